"""The kernel of a headless notebook: this interpreter, private sockets, and a Ctrl-C that reaches the running cell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager


def manager_class(**variables: str) -> Any:
    """A kernel manager class for one launch; ``variables`` go into the kernel's environment.

    Its ``interrupted`` says whether a signal came. Whatever ``python3`` kernelspecs the machine has, the kernel is
    ``sys.executable``.
    """

    class ThisPython(AsyncKernelManager):
        interrupted = False

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._sockets: Path | None = None
            if os.name == "posix":
                # Files in a folder of their own: free TCP ports are guessed, and launches at the same time collide.
                self._sockets = Path(tempfile.mkdtemp(prefix="dflash-"))
                self.transport, self.ip = "ipc", str(self._sockets / "k")

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(
                argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                env=variables,
                display_name="Python 3 (ipykernel)",
                language="python",
            )

        async def _async_start_kernel(self, **kw: Any) -> None:
            await super()._async_start_kernel(**kw)
            loop = asyncio.get_running_loop()
            # nbclient's own handler ends the kernel at once, and with it the run, in the middle of a step.
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                    loop.add_signal_handler(number, self._on_signal)

        start_kernel = _async_start_kernel  # type: ignore[assignment]

        def _on_signal(self) -> None:
            again, type(self).interrupted = type(self).interrupted, True
            self._sent = asyncio.ensure_future(self._async_signal_kernel(signal.SIGKILL if again else signal.SIGINT))

        def cleanup_connection_file(self) -> None:
            super().cleanup_connection_file()
            if self._sockets is not None:
                shutil.rmtree(self._sockets, ignore_errors=True)

    return ThisPython
