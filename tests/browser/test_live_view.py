"""The dashboard in a real JupyterLab: lanes that change while the kernel is busy, and buttons that answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
import tiny_texts

from dflash_lib import events

ROOT = Path(__file__).parents[2]

CELLS = [
    "steps = 4000\nname = 'browser'",
    "from fake_trainer import FakeTrainer\nfrom dflash_lib import Dashboard, RunConfig\n"
    "trainer = FakeTrainer(RunConfig(steps=steps, name=name, runs_dir='runs'), threads=2, compile_seconds=3)",
    "display(Dashboard(trainer))\nrun = trainer.start()\nawait run.wait()\nprint('the run has ended')",
]
ACKNOWLEDGED = 2.0  # seconds from a press to its words in every lane


def write_notebook(path: Path, cells: list[str]) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(book, path)


# Notes everything the dashboard shows, and when a button was pressed: seen by the page itself, so that a machine that
# is slow to ask the page misses nothing and adds nothing to the times.
WATCH = """() => {
    window.shown = []; window.pressed = 0
    const look = () => {
        const rows = [...document.querySelectorAll('.dflash-dashboard tr[data-lane]')]
        const lanes = Object.fromEntries(rows.map(row => [row.dataset.lane, row.children[1].innerText]))
        const text = document.querySelector('.dflash-dashboard')?.innerText ?? ''
        if (rows.length && text !== window.shown.at(-1)?.text) window.shown.push({t: performance.now(), lanes, text})
    }
    new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true})
    document.addEventListener('click', event => {
        if (event.target.closest('.dflash-dashboard button')) window.pressed = performance.now()
    }, true)
}"""


class View:
    """What a person sees of the dashboard on a page."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.evaluate(WATCH)

    def lanes(self) -> dict[str, str]:
        """Lane -> its row's words for the state, and what was asked for, as shown."""
        return self.page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll('.dflash-dashboard tr[data-lane]')].map(
                row => [row.dataset.lane, row.children[1].innerText]))"""
        )

    def steps(self) -> dict[str, int]:
        return self.page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll('.dflash-dashboard tr[data-lane]')].map(
                row => [row.dataset.lane, Number(row.children[2].innerText)]))"""
        )

    def text(self) -> str:
        return self.page.locator(".dflash-dashboard").inner_text()

    def until(self, fits: Callable[[dict[str, str]], bool], seconds: float) -> float:
        """Waits until the lanes read as they should; returns how long it took."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            lanes = self.lanes()
            if lanes and fits(lanes):
                return time.monotonic() - begun
            time.sleep(0.03)
        pytest.fail(f"not within {seconds} s; the lanes read {self.lanes()}; errors: {self.errors()}")

    def history(self, lane: str) -> list[str]:
        """The states that a lane has shown, each as often as it came."""
        said = self.page.evaluate("lane => window.shown.map(one => one.lanes[lane] ?? '')", lane)
        states = [words.split("\n")[0].strip() for words in said]
        return [one for one, before in zip(states, ["", *states], strict=False) if one and one != before]

    def since_press(self) -> list[dict[str, Any]]:
        """What was shown after the last press, in order: ``lanes`` and the whole ``text``, ``t`` seconds after it."""
        return self.page.evaluate(
            """() => window.shown.filter(one => one.t > window.pressed).map(
                one => ({...one, t: (one.t - window.pressed) / 1000}))"""
        )

    def press(self, button: str, effect: str) -> list[dict[str, Any]]:
        """Presses a button as a person does: every lane says so in time, or shows the ``effect`` already.

        Returns what was shown from the press until then.
        """
        self.page.locator(f".dflash-dashboard .df-{button}:enabled").click()
        words, end = f"{button} asked for", time.monotonic() + 30
        while time.monotonic() < end:
            shown = self.since_press()
            lanes = shown[-1]["lanes"] if shown else {}
            times = [
                next((one["t"] for one in shown if words in one["lanes"][lane] or effect in one["text"]), None)
                for lane in lanes
            ]
            if times and None not in times:
                assert max(times) < ACKNOWLEDGED, f"{button}: acknowledged only after {times} s"
                return shown
            time.sleep(0.1)
        pytest.fail(f"{button}: not acknowledged; the lanes read {self.lanes()}; errors: {self.errors()}")

    def errors(self) -> list[str]:
        kinds = "application/vnd.jupyter.error", "application/vnd.jupyter.stderr"
        found = [self.page.locator(f".jp-OutputArea-output[data-mime-type='{kind}']") for kind in kinds]
        return [text for locator in found for text in locator.all_inner_texts()]


def test_an_error_would_be_seen(lab: Any, page: Any) -> None:
    """The others find no error; this is what they would find."""
    write_notebook(lab.notebooks / "error.ipynb", ["import sys\nprint('loud', file=sys.stderr)\n1/0"])
    lab.open(page, "error.ipynb")
    lab.run_all(page)
    page.locator(".jp-OutputArea-output", has_text="ZeroDivisionError").wait_for()
    assert [words in text for words, text in zip(("ZeroDivisionError", "loud"), View(page).errors(), strict=True)]


SLOW_BACKEND = """
import time
from torch._dynamo import lookup_backend

SECONDS = [5.0]  # of the process's first compile: time enough for a person to press a button meanwhile

def slow_first(graph, inputs, **options):
    time.sleep(SECONDS.pop() if SECONDS else 0)
    return lookup_backend("aot_eager")(graph, inputs, **options)
"""


def write_backend(folder: Path) -> None:
    """``backend="slow_first"`` in kernels that work in ``folder``: torch finds backends among entry points."""
    (folder / "slow_backend.py").write_text(SLOW_BACKEND)
    package = folder / "slow_backend-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-backend\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torch_dynamo_backends]\nslow_first = slow_backend:slow_first\n")


def steps_until_effect(log: list[dict[str, Any]], request: str, effect: Callable[[dict[str, Any]], bool]) -> int:
    """How many steps a lane finished, at most, between the trainer's hearing a request and its taking effect."""
    asked = next(i for i, event in enumerate(log) if event.get("request") == request)
    done = next(i for i, event in enumerate(log) if i > asked and "request" not in event and effect(event))
    lanes = [event["thread"] for event in log[asked:done] if event["kind"] == "step"]
    return max((lanes.count(lane) for lane in lanes), default=0)


def test_notebook_01_live(lab: Any, page: Any, picture: Callable[[Any, str], Path]) -> None:
    """The real trainer, in the notebook people open, in the dark theme: lanes, every button, what is left."""
    texts = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": "word " * n}]}
        for n in range(8, 40)
    ]
    (lab.notebooks / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    write_backend(lab.notebooks)
    parameters = {
        "target": str(tiny_texts.save_folder(lab.notebooks / "tiny")),
        "train_data": "texts.jsonl",
        "heldout_data": "texts.jsonl",
        "run_dir": "runs/browser",
        "devices": ["cpu", "cpu"],
        "steps": 100_000,
        "bucket_lengths": False,  # a new length compiles again: the dashboard gets something to show
        "buckets": None,
        "target_layers": [0, 1, 2],
        "block_size": 4,
        "anchors": 4,
        "rows": 1,
        "drafter_layers": 1,
        "backend": "slow_first",
        "evaluate_prompts": 1,
        "evaluate_tokens": 4,
    }
    source = ROOT / "notebooks" / "01_train_drafter.ipynb"
    papermill.execute_notebook(source, lab.notebooks / "01.ipynb", parameters, kernel_name="python3", prepare_only=True)
    lab.theme("JupyterLab Dark")
    lab.open(page, "01.ipynb")
    view = View(page)
    lab.run_all(page)

    # a press during a compile is acknowledged with the compile's name, and waits for it
    view.until(lambda lanes: any("compiling: " in said for said in lanes.values()), 120)
    compiling, said = next((lane, said) for lane, said in view.lanes().items() if "compiling: " in said)
    frame = said.split("compiling: ")[1].split()[0]
    shown = view.press("checkpoint", "1 checkpoint,")
    picture(page, "01-compile-named-dark")
    waits = f"checkpoint asked for: waits for the compile of {frame}"
    assert any(waits in one["lanes"][compiling] for one in shown)

    view.until(lambda lanes: len(lanes) == 2 and min(view.steps().values()) >= 4, 180)
    assert lab.cell_is_running(page)
    seen = {said.partition(":")[0] for lane in view.lanes() for said in view.history(lane)}
    assert {"compiling", "running"} <= seen
    assert seen & {"waiting for a compile", "waiting for the others"}
    assert "1 checkpoint, the last at step 1:" in view.text(), "the step whose compile was waited for"

    view.press("pause", "paused")
    view.until(lambda lanes: all("paused" in said for said in lanes.values()), 60)
    still = view.steps()
    assert len(set(still.values())) == 1, "averaged lanes pause at the same step"
    time.sleep(1.2)
    assert view.steps() == still
    page.locator(".dflash-dashboard").scroll_into_view_if_needed()
    picture(page, "01-paused-dark")

    view.press("resume", "running\n")
    view.until(lambda _: all(view.steps()[lane] > step for lane, step in still.items()), 60)

    view.press("evaluate", "heldout 1.")
    page.wait_for_function("document.querySelector('.dflash-dashboard').innerText.includes('heldout 1.')")

    view.press("stop", "stopped")
    view.until(lambda lanes: all("stopped" in said for said in lanes.values()), 60)

    lab.wait_for_last_cell(page, 90)
    log = events.read(lab.notebooks / "runs" / "browser" / "events.jsonl")
    for request, effect in {
        "checkpoint": lambda event: event["kind"] == "checkpoint",
        "pause": lambda event: event.get("state") == "paused",
        "resume": lambda event: event.get("state") == "running",
        "evaluate": lambda event: event.get("detail") == "evaluating",
        "stop": lambda event: event.get("state") == "stopped",
    }.items():
        assert steps_until_effect(log, request, effect) <= 1, f"{request}: the step under way, and no other"
    outputs = lab.outputs(page)
    assert [output for output in outputs if output["output_type"] == "error"] == []
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2, "the dashboard as it ended, and the timeline"
    page.locator(".jp-OutputArea-output img[src^='data:image/png']").first.scroll_into_view_if_needed()
    picture(page, "01-ended-dark")


def test_what_a_dashboard_leaves(lab: Any, page: Any, picture: Callable[[Any, str], Path]) -> None:
    """A stand-in trainer in the light theme: known compiles, a run that is stopped while paused, no stray output."""
    lab.theme("JupyterLab Light")
    write_notebook(lab.notebooks / "live.ipynb", CELLS)
    lab.open(page, "live.ipynb")
    view = View(page)
    lab.run_all(page)

    # while the kernel is busy, each lane goes through compiling and waiting to running
    view.until(lambda lanes: len(lanes) == 2 and all(step >= 5 for step in view.steps().values()), 90)
    assert lab.cell_is_running(page)
    assert view.history("drafter-0")[-2:] == ["compiling: attention", "running"]
    assert view.history("drafter-1")[-3:] == ["waiting for a compile", "compiling: attention", "running"]
    first = view.steps()
    view.until(lambda _: all(view.steps()[lane] > step for lane, step in first.items()), 20)
    assert lab.cell_is_running(page)

    view.press("pause", "paused")
    view.until(lambda lanes: all("paused" in said for said in lanes.values()), 30)
    still = view.steps()
    time.sleep(1.2)
    assert view.steps() == still, "a paused run takes no steps"
    picture(page, "live-paused")

    view.press("stop", "stopped")
    view.until(lambda lanes: all("stopped" in said for said in lanes.values()), 30)
    page.locator(".jp-OutputArea-output", has_text="the run has ended").wait_for()
    image = page.locator(".jp-OutputArea-output img[src^='data:image/png']")
    image.wait_for()
    assert image.evaluate("image => image.naturalWidth") > 600
    assert page.locator(".jp-OutputArea-output details", has_text="The dashboard as it ended").count() == 1
    assert view.errors() == []
    assert page.locator(".dflash-dashboard button:enabled").count() == 0
    picture(page, "live-ended")
