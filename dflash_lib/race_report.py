"""Says what the race's results mean: a table, one paragraph for each outcome, and a picture."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lib.atomic import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dflash_lib.race_lab import Result

# Okabe and Ito's palette, which colour-blind people can tell apart; the hatch says the same a second time.
_LOOKS = {
    "ok": ("#009E73", ""),
    "leaks": ("#56B4E9", ".."),
    "errors": ("#E69F00", "//"),
    "hang": ("#D55E00", "xx"),
    "crash": ("#000000", ""),
}


# --- words --------------------------------------------------------------------------------------------------------
def leaks_in_words(result: Result) -> str:
    """The leaks of one result: shares of reads, things left behind, lanes unlike themselves alone; "none" if none."""
    leaks, words = result.leaks, []
    if leaks.get("is_compiling_seen"):
        words.append(f"is_compiling {leaks['is_compiling_seen']:.0%}")
    if leaks.get("tracing_seen"):
        words.append(f"tracing {leaks['tracing_seen']:.1%}")
    if leaks.get("left_behind") and result.outcome not in ("hang", "crash"):
        words.append(f"{len(leaks['left_behind'])} left behind")
    if result.differences and result.differences["lanes"]:
        words.append(f"{result.differences['lanes']} lanes off by {result.differences['largest']:.0e}")
    return ", ".join(words) or "none"


def errors_in_words(result: Result, names: dict[str, str] | None = None) -> str:
    """The errors of one result, most frequent kind first; "none" if none."""
    counts = sorted(result.errors.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {(names or {}).get(kind, kind)}" for kind, count in counts) or "none"


def table(results: Sequence[Result], *, folded: bool = False) -> str:
    """One line a cell: workload, strategy, outcome, steps, compiles, seconds, errors by kind, leaks.

    Args:
        folded: for a notebook's page: each error and each leak on a line of its own, in one column.
    """
    seen_as = ("errors by kind, leaks",) if folded else ("errors by kind", "leaks")
    rows: list[tuple[str, ...]] = [("workload", "strategy", "outcome", "steps", "compiles", "seconds", *seen_as)]
    for result in results:
        numbers = (
            result.workload + (" (imitated)" if result.imitated else ""),
            result.strategy,
            result.outcome,
            f"{result.steps_done:,}/{result.steps_planned:,}",
            f"{result.compiles:,}",
            f"{result.seconds:.1f}",
        )
        seen = errors_in_words(result), leaks_in_words(result)
        if folded:
            each = [item for words in seen if words != "none" for item in words.split(", ")] or ["none"]
            rows += [(*numbers, each[0]), *(("",) * 6 + (item,) for item in each[1:])]
        else:
            rows.append((*numbers, *seen))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def explain(result: Result) -> str:
    """One paragraph: what happened, why this strategy could or could not prevent it, and what this torch adds."""
    if result.outcome != "ok":
        sentences = [_happened(result), *_causes(result), _WHY_IT_FAILS[result.strategy]]
    elif result.strategy == "thread_local":
        sentences = [_happened(result), _WHY_IT_HOLDS[result.workload]]
    else:
        sentences = [_happened(result), _why_it_survived(result)]
    name = result.workload + (" (CPU twin)" if result.imitated else "")
    return f"{result.strategy} under {name}: " + " ".join(filter(None, [*sentences, _cost(result)]))


def about_torch(result: Result) -> str:
    """What decides the outcomes in the torch that ran this result: a line a feature, found by looking."""
    features = result.features
    lines = [
        "tracing flag: " + ("one for the process" if features["tracing_flag_is_global"] else "one a thread (2.14 on)"),
        "nn.Module's hooks while tracing: "
        + ("patched for the process" if features["module_patches_are_global"] else "the tracing thread's own"),
        "is_compiling() during a compile: "
        + (
            "True in every thread (2.13 on), which masks the RuntimeError and changes eager code instead"
            if features["is_compiling_held_while_compiling"]
            else "True only inside compiled code, so the tracing flag raises a RuntimeError elsewhere"
        ),
        "compile settings: "
        + (
            "stay in the thread that sets them (2.12 on)"
            if features["settings_stay_in_their_thread"]
            else "shared by all threads"
        ),
    ]
    return "\n".join([f"torch {result.torch}", *(f"  {line}" for line in lines)])


def _happened(result: Result) -> str:
    steps = f"{result.steps_done:,} of {result.steps_planned:,} steps"
    if result.outcome == "crash":
        return f"the process died (exit code {result.exit_code}) after {steps}."
    if result.outcome == "hang":
        waits = "; ".join(f"{thread} in {frames[-1]}" for thread, frames in result.stacks.items() if frames)
        return f"nothing moved any more after {steps}: {waits or 'no stack could be taken'}."
    errors, leaks = errors_in_words(result), leaks_in_words(result)
    return f"{steps} done, {result.compiles:,} compiles; errors: {errors}; leaks: {leaks}."


def _causes(result: Result) -> list[str]:
    """What in torch made it happen; only what was seen in this result is explained."""
    found, leaks, differences = [], result.leaks, result.differences
    kinds = " ".join(result.errors)
    if result.outcome == "hang" and result.workload == "shared_gpu_backward":
        found.append(
            "One thread holds torch's compile_lock and waits for the GPU's autograd thread; that thread is inside "
            "another thread's backward, which compiles lazily and waits for compile_lock."
        )
    if result.exit_code == -signal.SIGSEGV and result.features.get("device_guard_dies_with_its_thread"):
        found.append(
            "Where no GPU is to be seen, the first thread that compiled owns the process's CUDA device guard (torch "
            "2.10 and 2.11); it ended, and the next compile read freed memory (hazard device-guard)."
        )
    if "FX tracing flag" in kinds:
        found.append(
            "A thread that traced set the module-global _is_fx_tracing_flag, and every compiled call of any other "
            "thread took itself for a part of that trace."
        )
    if "entered a tracer" in kinds:
        found.append(
            "A trace replaces nn.Module.__call__ and __getattr__ for the whole process, so eager module calls of other "
            "threads ran into a tracer that does not know their modules."
        )
    traces = result.workload in ("make_fx", "symbolic_trace", "unpickle_graph_module")
    if traces and "FX tracing flag" not in kinds and not result.features.get("tracing_flag_is_global"):
        found.append(
            "Compiled calls of other threads go through: this torch (2.14 on) keeps the tracing flag per thread, but "
            "still patches nn.Module for the whole process."
        )
    if leaks.get("left_behind") and result.outcome in ("errors", "leaks"):
        found.append(
            "Two threads saved and restored the same globals in interleaved order, which left "
            f"{', '.join(leaks['left_behind'])} changed for good."
        )
    if leaks.get("is_compiling_seen"):
        found.append(
            "This torch holds the global is_compiling() True while any thread compiles: eager code elsewhere read "
            f"True in {leaks['is_compiling_seen']:.0%} of {leaks['reads']:,} reads."
        )
    if differences and differences["lanes"]:
        found.append(
            f"Nothing was raised, but {differences['lanes']} of {result.threads} lanes have other losses than alone "
            f"(by up to {differences['largest']:.0e}): default AdamW asks is_compiling() and takes another code path."
        )
    if result.workload == "compile_storm" and not kinds and _masked(result):
        found.append(
            "The RuntimeError of releases up to 2.12 is hidden here, not cured: it is raised only while is_compiling() "
            "is False, and the leak of that flag masks it."
        )
    return found


def _masked(result: Result) -> bool:
    features = result.features
    return bool(features.get("tracing_flag_is_global") and features.get("is_compiling_held_while_compiling"))


_WHY_IT_FAILS = {
    "none": "Nothing stands between the threads: this is the control.",
    "exec_lock": "The lock is released after each thread's first call; recompiles and traces come whenever shapes "
    "change, outside it.",
    "warmup_lock": "The lock ends with each thread's first step; the second step of one compiles again beside the "
    "others' first.",
    "main_thread_warmup": "The warm-up ends before the workers begin, and they still compile and trace for themselves.",
    "module_wrapper": "The stand-in in sys.modules is never asked: Tracer.trace writes its flag with a `global` "
    "statement, into the real module's dictionary.",
    "thread_local": "A state that is not isolated is still at work: `fx_patch.report()` says which hazards are open.",
}

_WHY_IT_HOLDS = {
    "compile_storm": "Tracing flag, is_compiling() and module patches belong to the thread that compiles. Nothing is "
    "locked, nothing is warmed up, and each lane's losses are bit for bit those it has alone.",
    "make_fx": "The tracing flag and the module patches belong to the thread that traces; others do not see them.",
    "symbolic_trace": "nn.Module's hooks ask whose thread it is: only the tracing thread enters its tracer, also with "
    "two traces at once.",
    "unpickle_graph_module": "Unpickling traces again, and that trace's state is its own thread's only.",
    "shared_gpu_backward": "A worker's backward runs in the worker (autograd's multithreading is off there), so nobody "
    "who holds compile_lock waits for a thread that wants it.",
}


def _why_it_survived(result: Result) -> str:
    """Why a strategy that isolates nothing went through: what this torch's own code says about it."""
    features = result.features
    if result.workload in ("make_fx", "symbolic_trace", "unpickle_graph_module"):
        if not features.get("tracing_flag_is_global"):
            return (
                "It survives because of torch, not of the strategy: from 2.14 on the tracing flag is thread-local, so "
                "compiled calls of others no longer see a trace. nn.Module is still patched for the whole process."
            )
        return "It survives by luck: the flag is a module global in this torch, and no call happened to meet a trace."
    if result.workload == "compile_storm" and not features.get("is_compiling_held_while_compiling"):
        return (
            "It survives by luck: here the flag is global and is_compiling() is not held during a compile, so a call "
            "that meets another thread's trace raises; with more steps or threads one will."
        )
    if result.workload == "shared_gpu_backward":
        return "It survives by luck: no lazy backward met another thread's compile; more shapes make it certain."
    return "It survives by luck: no reader happened to look while another thread compiled."


def _cost(result: Result) -> str:
    costs = result.costs
    if result.strategy == "main_thread_warmup" and "compiles_in_main" in costs:
        slowest = max(result.first_step_seconds.get(f"drafter-{index}", 0.0) for index in range(result.threads))
        return (
            f"What the warm-up cost: {costs['warm_up_seconds']:.1f} s and {costs['compiles_in_main']} compile in the "
            f"main thread; then {costs['lanes_that_compiled_again']} of {result.threads} lanes compiled the same shape "
            f"again (slowest first step: {slowest:.1f} s). Set up in the main thread and not found in a worker: "
            f"{', '.join(costs['stays_in_main']) or 'nothing'}."
        )
    if result.strategy == "module_wrapper" and costs.get("reaches_the_tracer") is False:
        return "Measured: during a trace the real module's flag was True while the stand-in's was False."
    if result.strategy == "module_wrapper" and "reaches_the_tracer" in costs:
        return "In this torch there is no such global left to stand in for."
    return ""


# --- a picture ----------------------------------------------------------------------------------------------------
def draw(results: Sequence[Result], path: str | Path) -> Path:
    """Draws the grid: a column a workload, a bar a strategy; steps, errors, leaks and wall time one below the other.

    Args:
        path: where to; its suffix decides the format (.png, .svg, .pdf).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    workloads = list(dict.fromkeys(result.workload for result in results))
    strategies = list(dict.fromkeys(result.strategy for result in results))
    cells = {(result.workload, result.strategy): result for result in results}
    panels = (
        ("steps done (% of planned)", lambda r: 100 * r.steps_done / max(1, r.steps_planned)),
        ("steps that failed (% of tried)", lambda r: 100 * (r.attempts - r.steps_done) / max(1, r.attempts)),
        ("is_compiling() or tracing seen\nby eager code (% of reads)", _seen),
        ("wall time (s)", lambda r: r.seconds),
    )
    figure = Figure(figsize=(2.4 + 2.7 * len(workloads), 1.6 + len(panels) * (0.6 + 0.26 * len(strategies))))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), len(workloads), squeeze=False, sharey=True, sharex="row")
    for column, workload in enumerate(workloads):
        for row, (label, value) in enumerate(panels):
            ax: Axes = axes[row][column]
            for place, strategy in enumerate(strategies):
                if (result := cells.get((workload, strategy))) is None:
                    continue
                colour, hatch = _LOOKS[result.outcome]
                ax.barh(place, value(result), color=colour, hatch=hatch, edgecolor="white", linewidth=0)
                inside = row == 1 and value(result) > 0
                note = ax.annotate(
                    _label(result, row),
                    (0 if inside else value(result), place),
                    (3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=6.5,
                    bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"} if inside else None,
                )
                note.set_in_layout(False)  # its length must not squeeze the axes
            ax.set_xlabel(label, fontsize=8)
            ax.tick_params(labelsize=8, labelbottom=True)
            ax.spines[["top", "right"]].set_visible(False)
    for row, limit in enumerate((100, 100, 130, None)):
        axes[row][0].set_xlim(0, limit)
        if limit:  # shares end at 100; what is right of it is room for words
            axes[row][0].set_xticks(range(0, 101, 20))
    for column, workload in enumerate(workloads):
        imitated = any(result.imitated for result in results if result.workload == workload)
        axes[0][column].set_title(workload.replace("_", " ") + ("\n(CPU twin)" if imitated else ""), fontsize=10)
    axes[0][0].set_yticks(range(len(strategies)), strategies)
    axes[0][0].invert_yaxis()
    figure.legend(
        handles=[Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in _LOOKS.items()],
        loc="lower center",
        ncols=len(_LOOKS),
        frameon=False,
        title=f"worst outcome of the cell; torch {results[0].torch if results else ''}, "
        f"{results[0].threads if results else 0} threads on {results[0].device if results else ''}",
    )
    figure.tight_layout(rect=(0, 0.7 / figure.get_figheight(), 1, 1))  # the legend's two lines below
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    form = target.suffix.removeprefix(".")
    return replace_file(target, lambda temporary: figure.savefig(temporary, dpi=120, format=form))


def _seen(result: Result) -> float:
    return 100 * max(result.leaks.get("is_compiling_seen", 0), result.leaks.get("tracing_seen", 0))


_SHORT = {
    "RuntimeError: FX tracing flag": "flag",
    "NameError: entered a tracer": "tracer",
    "AssertionError: another trace's patches": "patcher",
}


def _label(result: Result, row: int) -> str:
    """The words at a bar's end: what the bar's length alone does not say."""
    if row == 0 and result.outcome in ("hang", "crash"):
        return result.outcome
    if row == 1 and result.errors:
        kinds = errors_in_words(result, _SHORT).split(", ")
        return ", ".join(kinds[:2]) + (" ..." if len(kinds) > 2 else "")
    if row == 2 and result.differences and result.differences["lanes"]:
        return f"{result.differences['lanes']} lanes differ"
    return ""
