"""Runs the small programs that show a hazard: each in a watched subprocess, where a crash or a hang is a result.

From a shell, ``python -m dflash_lib.provocations tracing-flag generators --patched --seconds 2`` runs two of them in
this process and prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

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
        Each name with its outcome. A program that kills or hangs its process gets "crashed" or "hung", and the others
        run all the same.

    Patched programs share a process, which shows that they leave nothing behind. Unpatched ones do leave torch damaged:
    each has a process of its own, forked from one that has imported torch; where there is an NVIDIA driver, because
    CUDA does not survive a fork, started anew, several at a time.
    """
    waiting = list(names)
    forks = not patched and not Path("/proc/driver/nvidia").exists()
    if not patched and not forks:
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
            for done in pool.map(lambda name: list(_one_process([name], patched, forks, seconds, timeout)), waiting):
                yield from done
        return
    while waiting:
        done = list(_one_process(waiting, patched, forks, seconds, timeout))
        yield from done
        waiting = waiting[len(done) :]


def _one_process(
    names: list[str], patched: bool, forks: bool, seconds: float, timeout: float
) -> Iterator[tuple[str, Outcome]]:
    command = [sys.executable, "-u", "-m", "dflash_lib.provocations", *names]
    command += ["--seconds", str(seconds), "--timeout", str(timeout)]
    command += (["--patched"] if patched else []) + (["--fork"] if forks else [])
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
        output, errors, code = _text(stuck.stdout), _text(stuck.stderr) + "\nTimeout (", 1
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"hazard"')]
    for result in results:
        yield result.pop("hazard"), Outcome(**result)
    if len(results) < len(names):
        yield names[len(results)], _broken(code, errors, time.monotonic() - began)


def _broken(code: int, errors: str, seconds: float) -> Outcome:
    """The outcome of a program whose process did not report."""
    if "Timeout (" in errors:
        return Outcome("hung", 1, 1, _last_stack(errors), round(seconds, 2))
    last = errors.strip().splitlines()[-1:] or ["no message"]
    return Outcome("crashed", 1, 1, f"exit {code}: {last[0][:300]}", round(seconds, 2))


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
    parser.add_argument("--fork", action="store_true", help="each in a process of its own, forked from this one")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--timeout", type=float, default=90.0)
    chosen = parser.parse_args(arguments)

    if chosen.patched:
        from dflash_lib import fx_patch

        fx_patch.install()
    if not chosen.fork:
        for name in chosen.names:
            faulthandler.dump_traceback_later(chosen.timeout, exit=True)
            _report(name, _outcome(name, chosen.seconds))
            faulthandler.cancel_dump_traceback_later()
        os._exit(0)  # threads that are stuck must not keep the process
    for module in ("torch._dynamo", "torch._functorch.aot_autograd", "torch.export", "torch._inductor.cudagraph_trees"):
        importlib.import_module(module)  # once, for all

    for name in chosen.names:
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as stacks:
            child = os.fork()
            if child == 0:
                faulthandler.dump_traceback_later(chosen.timeout, exit=True, file=stacks)
                _report(name, _outcome(name, chosen.seconds))
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            stacks.seek(0)
            if code:
                _report(name, _broken(code, stacks.read(), time.monotonic() - began))


def _outcome(name: str, seconds: float) -> Outcome:
    """Runs a program here."""
    from dflash_lib import hazards
    from dflash_lib.provocation_programs import NotApplicable, program

    # This fault ends the process of any program that compiles in two threads, and hides what that one is to show.
    guard = hazards.by_name("device-guard")
    if name != guard.name and guard.present():
        guard.patch()
    began = time.monotonic()
    try:
        failures, attempts, detail = program(name)(seconds)
    except NotApplicable as reason:
        return Outcome("not applicable", detail=str(reason))
    took = round(time.monotonic() - began, 2)
    return Outcome("failed" if failures else "clean", failures, attempts, detail[:300], took)


def _report(name: str, outcome: Outcome) -> None:
    print(json.dumps({"hazard": name, **asdict(outcome)}), flush=True)


if __name__ == "__main__":
    main()
