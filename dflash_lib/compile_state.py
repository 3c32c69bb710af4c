"""What torch can be asked during a compile: the limit, the cache entries there are by now, global settings."""

from __future__ import annotations

from typing import Any


def limit() -> int | None:
    """``recompile_limit`` as the calling thread has it."""
    import torch

    return getattr(torch._dynamo.config, "recompile_limit", None)


def look_up_again(frame: Any) -> tuple[int | None, bool, str | None]:
    """How many cache entries the frame's code has by now, whether one of them fits it, and if not, why not.

    Dynamo looks before it waits for the lock and not again. So the same thing may be compiled twice (a race duplicate),
    and the second of two first compiles for different inputs is a recompile that torch gives no reason for.
    """
    from torch._C._dynamo import eval_frame

    look_up = getattr(eval_frame, "_debug_get_cache_entry_list", None)
    if look_up is None:
        return None, False, None
    entries = look_up(frame.f_code)
    if not entries or any(entry.guard_manager.check(frame.f_locals) for entry in entries):
        return len(entries), bool(entries), None
    failed = entries[0].guard_manager.check_verbose(frame.f_locals).verbose_code_parts
    return len(entries), False, failed[0] if failed else None


def settings() -> dict[str, str]:
    """Global settings Dynamo guards on, as the calling frame had them."""
    import torch

    return {
        "grad_mode": str(torch.is_grad_enabled()),
        "default_dtype": str(torch.get_default_dtype()),
        "num_threads": str(torch.get_num_threads()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "autocast(cpu)_enabled": str(torch.is_autocast_enabled("cpu")),
        "autocast(cuda)_enabled": str(torch.is_autocast_enabled("cuda")),
    }
