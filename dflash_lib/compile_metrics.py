"""Turns torch's CompilationMetrics (the object, or its JSON in a TORCH_TRACE log) into the fields of a compile event.

No torch: the live monitor and the import of trace folders share this. Fields are read by name and may be missing,
as they do from release to release (2.9 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import reasons

CLASSES = ("first", "recompile", "backward", "race_duplicate", "eager_fallback", "cache_hit", "failed")
PARTS = ("dynamo", "aot", "inductor", "triton")
COMPILE_KEYS = (
    "start",
    "seconds",
    "wait_seconds",
    "frame",
    "file",
    "line",
    "compile_id",
    "cls",
    "reason",
    "expected",
    "actual",
    "cache_size",
    "limit",
    "parts",
)
LONGEST_REASON = 4000  # characters; a reason may carry a whole stack


@dataclass
class Compile:
    """One compile as torch reported it, before it is known whose lane it belongs to. Times in seconds."""

    wall_start: float | None  # on time.time()'s clock
    fields: dict[str, Any]  # COMPILE_KEYS without start and wait_seconds, and guard, kind, source, cached
    backward: bool


def read(
    metrics: Any,
    *,
    raised: bool | None = None,
    all_reasons: list[str] | None = None,
    value: Callable[[str], str | None] | None = None,
    limit: int | None = None,
    forward: Mapping[str, Any] | None = None,
    waited_inside: float = 0.0,
    duplicate: bool = False,
    entries: int | None = None,
) -> Compile | None:
    """Reads one CompilationMetrics; None where it reports no compile (autotuning at run time).

    Args:
        metrics: the object, or a mapping.
        raised: whether the failure reached the caller (False: the frame then ran eagerly); None: unknown.
        all_reasons: the reasons against every cache entry, newest first; torch's metrics keep the first alone.
        value: present values of the frame's expressions, see :func:`reasons.frame_value`.
        limit: ``recompile_limit`` in the compiling thread.
        forward: fields of the forward compile with the same compile_id; a backward is reported without a name.
        waited_inside: seconds of torch's duration spent waiting for the compile lock; they are no compiling.
        duplicate: whether another thread had compiled the very same while this one waited for the lock.
        entries: cache entries of the code object when this compile began, where they were counted then.
    """

    def get(name: str, default: Any = None) -> Any:
        found = metrics.get(name) if isinstance(metrics, Mapping) else getattr(metrics, name, None)
        return default if found is None else found

    def seconds_of(*names: str) -> float:
        return next((get(name) / 1e6 for name in names if isinstance(get(name), (int, float))), 0.0)

    if get("is_runtime"):
        return None
    failed = get("fail_type")
    backward = get("is_forward") is False and not failed
    start, end = get("start_time_us"), get("end_time_us")
    seconds = seconds_of("duration_us")
    if not seconds and start is not None and end is not None:
        seconds = (end - start) / 1e6
    seconds = max(0.0, seconds - waited_inside)

    reason = _reason(get("recompile_reason"), all_reasons, value, duplicate and not backward)
    cached = _cached(get)
    cls = _class(get, failed, raised, backward, reason, cached)
    kind = reason.kind if reason else None
    text = reason.text if reason else None
    if failed:
        why = f"{failed}: {get('fail_reason', '')}".strip(": ")
        if reasons.LIMIT.search(str(get("fail_reason", ""))) or failed == "FailOnRecompileLimitHit":
            kind = "limit"
            text = why.split("\n", 1)[0] + (f"; last reason: {text}" if text else "")
        else:
            kind = "graph_break" if failed == "Unsupported" and cls == "eager_fallback" else "failed"
            text = why
    elif backward and forward:
        text, kind = text or forward.get("reason"), kind or forward.get("reason_kind")

    before = get("cache_size") if entries is None else entries
    if kind == "limit" and before is None and "accumulated" not in str(get("fail_reason", "")):
        before = limit
    known = dict(forward or {}) if backward else {}
    fields = {
        "seconds": seconds,
        "frame": get("co_name", known.get("frame")),
        "file": get("co_filename", known.get("file")),
        "line": get("co_firstlineno", known.get("line")),
        "compile_id": get("compile_id"),
        "cls": cls,
        "reason": text[:LONGEST_REASON] if text else None,
        "expected": reason.expected if reason else known.get("expected"),
        "actual": reason.actual if reason else known.get("actual"),
        "cache_size": known.get("cache_size") if backward else _entries(before, get("has_guarded_code"), failed),
        "limit": limit if limit is not None else known.get("limit"),
        "parts": _parts(seconds, backward, seconds_of),
        "guard": reason.guard if reason else known.get("guard"),
        "reason_kind": kind,
        "source": reason.source if reason else known.get("source"),
        "cached": cached,
    }
    return Compile(start / 1e6 if isinstance(start, (int, float)) else None, fields, backward)


def _reason(
    text: str | None, all_reasons: list[str] | None, value: Callable[[str], str | None] | None, duplicate: bool
) -> reasons.Reason | None:
    candidates = list(all_reasons or []) or ([text] if text else [])
    # A thread that waited for the lock may find the very entry it needs, but not as the newest one; and torch sees no
    # recompile at all in the second of two first compiles.
    raced = next((r for r in candidates if reasons.RACE in r), reasons.DUPLICATE if duplicate else None)
    chosen = raced or (candidates[0] if candidates else None)
    return reasons.parse(chosen, value) if chosen else None


def _class(
    get: Callable[..., Any],
    failed: str | None,
    raised: bool | None,
    backward: bool,
    reason: reasons.Reason | None,
    cached: bool,
) -> str:
    if failed:
        if raised is None:  # nobody watched the call: what torch does by itself with this failure
            raised = not (failed == "Unsupported" or get("config_suppress_errors"))
        return "failed" if raised else "eager_fallback"
    if backward:
        return "backward"
    if reason is not None:
        return "race_duplicate" if reason.kind == "race" else "recompile"
    return "cache_hit" if cached else "first"


def _cached(get: Callable[..., Any]) -> bool:
    """Whether torch's on-disk caches had everything that would have been generated."""
    names = [f"{cache}_{where}_cache" for cache in ("inductor_fx", "aotautograd") for where in ("local", "remote")]
    hits = {name: get(f"{name}_hit_count", 0) for name in names}
    misses = {name: get(f"{name}_miss_count", 0) for name in names}
    if any(hits[name] for name in names if name.startswith("aotautograd")):
        return True  # a whole compiled artifact was loaded, forward and backward
    return any(hits.values()) and not any(misses[name] for name in names if name.startswith("inductor"))


def _entries(before: int | None, guarded: bool | None, failed: str | None) -> int | None:
    """Entries of the code object after this compile; torch reports how many there were before it (None: none)."""
    if failed:
        return before
    return (before or 0) + (guarded is not False)


def _parts(seconds: float, backward: bool, seconds_of: Callable[..., float]) -> dict[str, float]:
    """The seconds, split without overlap: torch's own columns contain each other. The parts add up to ``seconds``."""
    whole_aot = seconds if backward else min(seconds, seconds_of("aot_autograd_cumulative_compile_time_us"))
    whole_inductor = min(whole_aot, seconds_of("inductor_cumulative_compile_time_us"))
    triton = min(whole_inductor, seconds_of("triton_compile_time_us"))
    parts = {"aot": whole_aot - whole_inductor, "inductor": whole_inductor - triton, "triton": triton}
    return {"dynamo": seconds - whole_aot, **parts}
