"""Everything about runs as folders: making one, launching notebooks, sweeps, comparing. One import for callers."""

from __future__ import annotations

from .launch import NotebookFailed, Tail, execute
from .run_folder import (
    new_run_dir,
    read_json,
    read_status,
    run_state,
    runs_root,
    write_environment,
    write_json,
    write_status,
    write_text,
)

__all__ = [
    "NotebookFailed",
    "Tail",
    "execute",
    "new_run_dir",
    "read_json",
    "read_status",
    "run_state",
    "runs_root",
    "write_environment",
    "write_json",
    "write_status",
    "write_text",
]
