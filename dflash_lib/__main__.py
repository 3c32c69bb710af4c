"""The same things from a shell: ``python -m dflash_lib COMMAND``.

Exit codes: 0 done, 1 the run failed or a threshold was hit, 2 the user's error, 130 / 143 for signals. ``--json``
puts one machine-readable line last. Each command is a few lines over the module that does the work.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_lib.errors import UserError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train DFlash drafters in threads, measure them, and see every recompile.",
)
UsageError: Any = typer.BadParameter.__base__  # click's, or that of the copy of click in newer releases of typer
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one machine-readable line last.")]


def _say(value: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(value, allow_nan=False), flush=True)


def _override(pairs: list[str]) -> dict[str, Any]:
    """``["steps=200", "lr=1e-3"]`` as names and values; the configuration coerces the text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise UserError(f"--set {pair}: write NAME=VALUE")
        values[name] = value
    return values


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="JSON or YAML file of parameters; none: the defaults.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Exactly this run folder.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE, wins over the file; repeatable.")] = None,
    measure: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Decode held-out prompts at the end.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Train a drafter, with progress on the terminal; then measure its acceptance length by real decoding."""
    from dflash_lib import fx_patch

    fx_patch.install()
    from dflash_lib.config import RunConfig
    from dflash_lib.threads import Trainer, summary

    overrides = _override(set_ or [])
    if run_dir is not None:
        overrides["run_dir"] = str(run_dir)
    chosen = RunConfig.from_file(config, **overrides) if config else RunConfig.from_dict(overrides)
    run = Trainer(chosen).start(progress=True)
    run.join()
    if measure and run.state == "completed":
        run.evaluate()
    print(summary(run.dir))
    _say({"run_dir": str(run.dir), "state": run.state}, as_json)


@app.command()
def demo(
    set_: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE for the notebook; repeatable.")] = None,
) -> None:
    """Run notebooks/01_train_drafter.ipynb headless, on whatever is there: the README's first command."""
    from dflash_lib import doctor as checks
    from dflash_lib import prepare, runs
    from dflash_lib.config import RunConfig

    chosen = {"name": "demo", "devices": prepare.demo_devices(), **_override(set_ or [])}
    reason = checks.no_cpp()
    if reason and chosen["devices"] == "auto" and "backend" not in chosen:
        print(f"{reason}; meanwhile the demo compiles with aot_eager, which needs neither", flush=True)
        chosen["backend"] = "aot_eager"
    run_dir = runs.new_run_dir(RunConfig.from_dict(chosen))
    runs.execute(_notebook("01_train_drafter.ipynb"), {**chosen, "run_dir": str(run_dir)}, run_dir)
    summary = run_dir / "summary.txt"
    print(summary.read_text(encoding="utf-8") if summary.exists() else f"run folder: {run_dir}")


@app.command()
def regenerate(
    out: Annotated[Path, typer.Argument(help="JSON lines file to write; an unfinished one is continued.")],
    count: Annotated[int | None, typer.Option(min=1, help="Conversations to make; none: all of --prompts.")] = None,
    heldout: Annotated[int, typer.Option(min=0, help="Conversations for --heldout-out, disjoint from the rest.")] = 0,
    heldout_out: Annotated[Path | None, typer.Option(help="JSON lines file of held-out conversations.")] = None,
    target: Annotated[str, typer.Option(help="'smollm2', a hub id, or a local folder.")] = "smollm2",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines whose user turns are answered; none: the target asks too.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answers; 0 is greedy.")] = 0.0,
    batch: Annotated[int | None, typer.Option(min=1, help="Conversations decoded together.")] = None,
    device: Annotated[str, typer.Option(help="'auto', 'cpu', 'cuda:0', ...")] = "auto",
    seed: int = 0,
    as_json: JsonFlag = False,
) -> None:
    """Let the target write training conversations: labels must match what it will say."""
    from dflash_lib import fx_patch

    fx_patch.install()
    from dflash_lib import data
    from dflash_lib import target as targets

    if count is None and prompts is None:
        raise UserError("--count: say how many conversations to make (or give --prompts)")
    made = data.regenerate(
        targets.load(target).to(_device(device)),
        prompts,
        out=out,
        count=count,
        heldout=heldout,
        heldout_out=heldout_out,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch=batch,
        seed=seed,
    )
    print(made)
    _say({"out": str(made)}, as_json)


@app.command()
def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, a run folder (its last checkpoint), or a folder of runs (the newest).")
    ],
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines of conversations; repeatable.")] = None,
    target: Annotated[str | None, typer.Option(help="The target; none: the one the checkpoint names.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for acceptance.json and its pictures.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Most prompts of each set.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    device: Annotated[str, typer.Option(help="'auto', 'cpu', 'cuda:0', ...")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Acceptance length and speed-up of a checkpoint, from real speculative decoding."""
    from dflash_lib import fx_patch

    fx_patch.install()
    from dflash_lib import evaluate as evaluation

    acceptance = evaluation.evaluate_checkpoint(
        checkpoint,
        prompts=prompts or None,
        target=target,
        out=_folder(out),
        count=count,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        device=_device(device),
        progress=_progress,
    )
    print(evaluation.table(acceptance))
    _say(acceptance, as_json)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, or a run folder (its last checkpoint).")],
    format: Annotated[str, typer.Option(help="z-lab or speculators.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write a checkpoint in the layout that a serving system loads."""
    from dflash_lib import checkpoint as checkpoints

    print(checkpoints.export(checkpoint, format=format, out=out))


@app.command()
def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder, an events.jsonl, or a TORCH_TRACE folder.")],
    fail_after_step: Annotated[
        int | None, typer.Option(min=0, help="Exit 1, naming them, when anything recompiled after this step.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures; none: the run folder.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw the recompile timeline: PNG, SVG, one HTML file, and a Perfetto trace."""
    from dflash_lib import timeline as timelines

    _folder(out)
    loaded = timelines.load(run)
    offenders = timelines.fail_after_step(loaded, fail_after_step) if fail_after_step is not None else []
    paths = timelines.draw_all(run, out=out)
    print(timelines.summary(loaded))
    for path in paths:
        print(path)
    if fail_after_step is not None and (passed := timelines.exempt(loaded, fail_after_step)):
        print(passed, file=sys.stderr)
    if fail_after_step is not None and not offenders:
        print(f"nothing recompiled after step {fail_after_step}")
    for offender in offenders:
        print(f"recompiled after step {fail_after_step}: {offender}", file=sys.stderr)
    _say({"paths": [str(path) for path in paths], "offenders": [str(o) for o in offenders]}, as_json)
    if offenders:
        raise typer.Exit(1)


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="A run folder or events.jsonl: before.")],
    run_b: Annotated[Path, typer.Argument(help="Another: after.")],
    out: Annotated[Path | None, typer.Option(help="Picture to write (.png or .svg).")] = None,
    fail_if_worse: Annotated[
        bool,
        typer.Option("--fail-if-worse", help="Exit 1 when anything recompiled in b that did not in a, or oftener."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Which recompiles are new, gone or changed between two runs."""
    from dflash_lib import timeline as timelines

    comparison = timelines.compare(run_a, run_b)
    print(comparison.table())
    if out is not None:
        print(comparison.draw(out))
    _say(comparison.to_dict(), as_json)
    if fail_if_worse and comparison.worse:
        raise typer.Exit(1)


@app.command()
def batch(sweep: Annotated[Path, typer.Argument(help="sweep.yaml: a notebook, a grid, how many at once.")]) -> None:
    """Run a notebook over a grid of parameters; done runs are not repeated."""
    from dflash_lib import runs

    results = runs.sweep_file(sweep)
    print(runs.table(results))
    if any(result["state"] != "completed" for result in results):
        raise typer.Exit(1)


@app.command()
def hazards(as_json: JsonFlag = False) -> None:
    """The hazards of the installed torch: present, provoked unpatched, provoked patched."""
    from dflash_lib import hazards as hazard_list

    text, code = hazard_list.main_text(as_json=as_json)
    print(text)
    if code:
        raise typer.Exit(code)


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """What is here and what is missing: torch, driver, devices, kernel, isolation, target."""
    from dflash_lib import doctor as checks

    findings = checks.examine()
    print(checks.text(findings))
    _say([finding.__dict__ for finding in findings], as_json)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _progress(what: str, done: int, of: int) -> None:
    """One line on the error stream, written over until it is full."""
    print(f"\r{what}: {done} of {of} prompts", end="\n" if done == of else "", file=sys.stderr, flush=True)


def _device(name: str) -> str:
    """'auto' is the first GPU, else the CPU; any other must be there."""
    import torch

    from dflash_lib import prepare

    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device: {name!r} is no device: use 'cpu', 'cuda:0', ... or 'auto'")
    return str(prepare.check_devices("--device", [name])[0])


def _folder(out: Path | None) -> Path | None:
    """A folder to write to, looked at before the work that fills it."""
    for path in [out, *out.absolute().parents] if out else []:
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {out}: {path} is a file; name a folder")
    return out


def _notebook(name: str) -> Path:
    """A notebook of this checkout."""
    path = Path(__file__).resolve().parent.parent / "notebooks" / name
    if not path.exists():
        raise UserError(f"{path}: not found; run this from a checkout of the repository (make demo)")
    return path


def _terminate(number: int, frame: Any) -> None:
    """Once is enough: ``timeout`` and torchrun send it to us and then to our group, and a second one would abort."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    """Runs a command; an error that the user caused becomes one line and exit code 2. No command: the help, and 2."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    words = sys.argv[1:]
    try:
        code = app(words or ["--help"], standalone_mode=False)  # else typer writes its errors itself, as boxes
    except UserError as error:
        print(f"dflash: {error}", file=sys.stderr)
        sys.exit(2)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "python -m dflash_lib"
        print(f"dflash: {' '.join(error.format_message().split()).rstrip('.')} (see {command} --help)", file=sys.stderr)
        sys.exit(2)
    sys.exit(code if words else 2)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
