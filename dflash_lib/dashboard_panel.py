"""The dashboard's widgets: value traits only, set by whoever calls :meth:`Panel.show` (one thread does)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from . import dashboard_view as view
from .dashboard_state import ENDED, Board

BUTTONS = (
    ("pause", "Pause", "pause", "every thread waits at its next step boundary"),
    ("resume", "Resume", "play", "go on after a pause"),
    ("checkpoint", "Checkpoint now", "save", "write a checkpoint at the next step boundary"),
    ("evaluate", "Evaluate now", "check", "measure the acceptance length at the next step boundary"),
    ("stop", "Stop", "stop", "end the run at its next step boundary, with a checkpoint"),
)
_PIECES = {
    "label": view.label,
    "lanes": view.lanes,
    "losses": view.losses,
    "compiles": view.compiles,
    "findings": view.findings,
}


class Panel:
    """Widgets for one Board.

    Args:
        title: the run's name.
        pressed: called with a button's name, in the kernel's main thread.
    """

    def __init__(self, title: str, pressed: Callable[[str], None]) -> None:
        self.title = title
        self._html = {name: widgets.HTML() for name in ("header", *_PIECES)}
        self._bar = widgets.FloatProgress(min=0.0, max=1.0, layout=widgets.Layout(width="360px"))
        self._buttons = {
            name: widgets.Button(description=words, icon=icon, tooltip=tooltip, disabled=True)
            for name, words, icon, tooltip in BUTTONS
        }
        for name, button in self._buttons.items():
            button.add_class(f"df-{name}")
            button.on_click(lambda _, name=name: pressed(name))
        row = widgets.Layout(flex_flow="row wrap", align_items="center")
        html = self._html
        self.widget = widgets.VBox(
            [
                widgets.HTML(view.STYLE),
                html["header"],
                widgets.HBox([self._bar, html["label"]], layout=row),
                widgets.HBox(list(self._buttons.values()), layout=row),
                html["lanes"],
                widgets.HBox([html["losses"], html["compiles"]], layout=widgets.Layout(flex_flow="row wrap")),
                html["findings"],
            ]
        )
        self.widget.add_class("dflash-dashboard")
        self._handles: list[tuple[Any, Any]] = []

    def show(self, board: Board, *, controls: bool) -> None:
        """Sets every widget whose content changed; ``controls``: whether there is a trainer to steer."""
        values = {name: piece(board) for name, piece in _PIECES.items()}
        for name, value in {"header": view.header(board, self.title), **values}.items():
            if self._html[name].value != value:
                self._html[name].value = value
        self._bar.value = min(1.0, board.step / board.steps) if board.steps else 0.0
        self._bar.bar_style = {"failed": "danger", "finished": "success", "completed": "success"}.get(
            board.state, "info"
        )
        lanes = board.lanes.values()
        alive = controls and not board.ended and any(lane.state not in ENDED for lane in lanes)
        paused = any(lane.state == "paused" or lane.request == "pause" for lane in lanes)
        for name, button in self._buttons.items():
            button.disabled = not alive or (name == "pause" and paused) or (name == "resume" and not paused)

    def display(self) -> None:
        """Shows the widgets in the current cell, with room below them for :meth:`leave`."""
        display(self.widget)
        picture, page = (display({kind: ""}, raw=True, display_id=True) for kind in ("text/plain", "text/html"))
        self._handles.append((picture, page))

    def leave(self, board: Board, picture: bytes) -> None:
        """Leaves what a saved notebook shows without a kernel: a PNG, and the whole dashboard as plain HTML."""
        image = {"image/png": base64.b64encode(picture).decode(), "text/plain": f"{self.title}: loss and compiles"}
        whole = view.snapshot(board, self.title)
        page = {"text/html": f"<details><summary>The dashboard as it ended</summary>{whole}</details>"}
        for picture_handle, page_handle in self._handles:
            picture_handle.update(image, raw=True)
            page_handle.update(page, raw=True)
