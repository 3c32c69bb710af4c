"""The timeline's page in a real browser with the network off: filters, zoom, the whole reason, themes, a huge run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from timeline_data import HARD_TEXT, compile_fields, huge, training

from dflash_lib import timeline
from dflash_lib.events import EventLog

Picture = Callable[[Any, str], Path]


def opened(page: Any, run: timeline.Timeline, folder: Path) -> Any:
    """The page of a run, open; anything it says on the console is an error."""
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(timeline.draw(run, folder / "timeline.html").as_uri())
    page.wait_for_function("window.timeline && window.timeline.ready")
    page.problems = problems
    return page


def click(page: Any, compile: int) -> None:
    place = page.evaluate(f"window.timeline.position({compile})")
    page.locator("#lanes").click(position=place)


def test_it_filters_zooms_and_shows_the_whole_reason(offline_page: Any, tmp_path: Path, picture: Picture) -> None:
    log = training(EventLog(None))
    run = timeline.from_events(log.events, "drafter-20261129-101500")
    page = opened(offline_page, run, tmp_path)
    assert "56 of 56" in page.inner_text("#count")
    assert all(page.locator(f"#{name}").is_visible() for name in ("curve", "lanes", "cache", "ruler"))
    assert page.inner_text("#offenders").count("drafter.py:120") == 1  # the last two parts of the path, not cut
    page.fill("#search", "hidden")
    sizes = [i for i, c in enumerate(run.compiles) if c.kind == "size"]
    assert f"{len(sizes)} of 56" in page.inner_text("#count")
    page.click("button[data-cls=backward]")
    assert f"{len(sizes) // 2} of 56" in page.inner_text("#count")
    page.click("#threadsum")
    page.uncheck("input[data-thread=drafter-1]")
    assert f"{len(sizes) // 3} of 56" in page.inner_text("#count")
    page.click("#threadsum")
    one = next(i for i in sizes if run.compiles[i].cls == "recompile")
    click(page, one)
    detail = page.inner_text("#detail")
    assert run.compiles[one].reason in detail and "pad it to a few buckets" in detail and "drafter-0" in detail
    before = page.evaluate("window.timeline.view()")
    page.locator("#lanes").hover(position={"x": 600, "y": 10})
    page.mouse.wheel(0, -600)
    page.wait_for_timeout(100)
    after = page.evaluate("window.timeline.view()")
    assert after[1] - after[0] < (before[1] - before[0]) * 0.9
    picture(page, "timeline-page-light")
    page.click("#reset")
    page.click("#axis")
    assert page.inner_text("#axis") == "axis: step" and page.evaluate("window.timeline.view()")[1] < 62
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    picture(page, "timeline-page-dark")
    assert not page.problems


def test_hostile_text_stays_text(offline_page: Any, tmp_path: Path) -> None:
    log = EventLog(None)
    text = dict.fromkeys(("frame", "file", "reason", "expected", "actual", "compile_id"), HARD_TEXT)
    fields = compile_fields(start=0.5, cls="recompile", **text)
    log.emit("compile", thread=HARD_TEXT, device=HARD_TEXT, t=1.0, **fields)
    page = opened(offline_page, timeline.from_events(log.events, HARD_TEXT), tmp_path)
    click(page, 0)
    assert "onerror=alert(1)" in page.inner_text("#detail pre")
    assert page.locator("img").count() == 0 and not page.problems


@pytest.mark.timeout(300)
def test_64_threads_and_100000_events_stay_usable(offline_page: Any, tmp_path: Path, picture: Picture) -> None:
    run = timeline.from_events(huge(), "huge")
    page = opened(offline_page, run, tmp_path)
    assert "50,000 of 50,000" in page.inner_text("#count")
    page.fill("#search", "mismatch")
    page.wait_for_function("window.timeline.matches() < 50000")
    click(page, 5)
    assert "drafter-0" in page.inner_text("#detail")
    page.locator("#lanes").hover(position={"x": 600, "y": 300})
    page.mouse.down()
    page.mouse.move(700, 100, steps=4)  # dragging up shows the threads below
    page.mouse.up()
    assert page.evaluate("document.getElementById('scroll').scrollTop") > 100
    picture(page, "timeline-page-huge")
    assert not page.problems
