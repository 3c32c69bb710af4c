"""Memory in GiB: what this process holds on a GPU, by torch's own allocator, and of the host. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def gpu_gib(device: object) -> float | None:
    """GiB that this process's tensors hold on a GPU (``"cuda:0"`` or a torch.device), whichever thread made them.

    It asks torch's allocator, so that no driver library is needed. None on a CPU, while no GPU is in use, and where
    the device does not say (the name of another machine's device, a driver that is gone).
    """
    torch = sys.modules.get("torch")
    if torch is None or not str(device).startswith("cuda") or not torch.cuda.is_initialized():
        return None
    try:
        return round(torch.cuda.memory_allocated(device) / 2**30, 3)
    except (RuntimeError, AssertionError):
        return None


def host_gib() -> float | None:
    """GiB of host memory that this process holds, or None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (OSError, ValueError, IndexError):
        return None
