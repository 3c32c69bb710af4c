"""Runs the small programs that show a hazard: each in a watched subprocess, where a crash or a hang is a result.

From a shell, ``python -m dflash_lib.provocations tracing-flag generators --patched --seconds 2`` runs two of them in
this process and prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_lib.hazard import Outcome


def run(name: str, *, patched: bool, seconds: float, timeout: float) -> Outcome:
    """Runs one program in a process of its own (see :meth:`Hazard.provoke`)."""
    return dict(run_many([name], patched=patched, seconds=seconds, timeout=timeout))[name]


def run_many(
    names: Sequence[str], *, patched: bool, seconds: float = 2.0, timeout: float = 90.0
) -> Iterator[tuple[str, Outcome]]:
    """Runs several programs, one after another in as few processes as that can be done in.

    Args:
        names: hazards' names.
        patched: whether isolation is installed first.
        seconds: how long each program tries.
        timeout: seconds that each program may take before its process is ended.

    Yields:
        Each name with its outcome, in no fixed order. A program that kills or hangs its process gets "crashed" or "hung"; those after
        it go on in a new process. Programs that leave torch damaged when unpatched have a process to themselves.
    """
    from dflash_lib.provocation_programs import LEAVES_DAMAGE

    alone = [] if patched else [name for name in names if name in LEAVES_DAMAGE]
    together = [name for name in names if name not in alone]
    for waiting in ([name] for name in alone):
        yield from _one_process(waiting, patched, seconds, timeout)
    while together:
        done = list(_one_process(together, patched, seconds, timeout))
        yield from done
        together = together[len(done) :]


def _one_process(names: list[str], patched: bool, seconds: float, timeout: float) -> Iterator[tuple[str, Outcome]]:
    command = [sys.executable, "-u", "-m", "dflash_lib.provocations", *names]
    command += ["--seconds", str(seconds), "--timeout", str(timeout)] + (["--patched"] if patched else [])
    project = str(Path(__file__).resolve().parents[1])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [project, os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=len(names) * timeout + 120, check=False
        )
        output, errors, code = ended.stdout, ended.stderr, ended.returncode
    except subprocess.TimeoutExpired as stuck:
        output, errors, code = _text(stuck.stdout), _text(stuck.stderr), 1
        errors += "\nTimeout (the process did not end itself)"
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"hazard"')]
    for result in results:
        yield result.pop("hazard"), Outcome(**result)
    if len(results) < len(names):
        took = time.monotonic() - began
        if "Timeout (" in errors:
            yield names[len(results)], Outcome("hung", 1, 1, _last_stack(errors), took)
        else:
            last = errors.strip().splitlines()[-1:] or ["no message"]
            yield names[len(results)], Outcome("crashed", 1, 1, f"exit {code}: {last[0][:300]}", took)


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _last_stack(errors: str) -> str:
    """Where the threads of a hung process were: the innermost frame of each, in one line."""
    frames: list[str] = []
    lines = errors.splitlines()
    for above, line in itertools.pairwise(lines):
        if above.startswith(("Thread 0x", "Current thread 0x")) and line.strip().startswith("File"):
            frames.append(line.strip().replace('File "', "").replace('"', "").rpartition("site-packages/")[2])
    return "stuck in " + " | ".join(frames) if frames else "stuck"


def main(arguments: Sequence[str] | None = None) -> None:
    """What the subprocess does: runs the named programs here and prints a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--patched", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--timeout", type=float, default=90.0)
    chosen = parser.parse_args(arguments)

    from dflash_lib.provocation_programs import NotApplicable, program

    if chosen.patched:
        from dflash_lib import fx_patch

        fx_patch.install()
    for name in chosen.names:
        faulthandler.dump_traceback_later(chosen.timeout, exit=True)
        began = time.monotonic()
        result: dict[str, Any]
        try:
            failures, attempts, detail = program(name)(chosen.seconds)
            status = "failed" if failures else "clean"
            result = {"status": status, "failures": failures, "attempts": attempts, "detail": detail[:300]}
        except NotApplicable as reason:
            result = {"status": "not applicable", "detail": str(reason)}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"hazard": name, **result, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads that are stuck must not keep the process


if __name__ == "__main__":
    main()
