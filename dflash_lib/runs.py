"""Everything about runs as folders: making one, launching notebooks, sweeps, comparing. One import for callers."""

from __future__ import annotations

from .atomic import write_json, write_text
from .launch import NotebookFailed, Tail, execute
from .report import draw, folders, frame, history, rows, summary, table
from .run_folder import (
    json_or_none,
    new_run_dir,
    read_status,
    run_state,
    runs_root,
    write_environment,
    write_status,
)
from .sweep import sweep, sweep_file

__all__ = [
    "NotebookFailed",
    "Tail",
    "draw",
    "execute",
    "folders",
    "frame",
    "history",
    "json_or_none",
    "new_run_dir",
    "read_status",
    "rows",
    "run_state",
    "runs_root",
    "summary",
    "sweep",
    "sweep_file",
    "table",
    "write_environment",
    "write_json",
    "write_status",
    "write_text",
]
