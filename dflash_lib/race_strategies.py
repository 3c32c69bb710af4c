"""The race's strategies: what people do so that several threads can call torch.compile, one class each.

Four of them were tried on a real pipeline, failed, and are kept here word for word in what they do; ``none`` is
the control and ``thread_local`` is :mod:`dflash_lib.fx_patch`, the only one the training path uses. A strategy acts
at five places of a program: before anything compiles (``prepare``), in the main thread before the workers start
(``warm_up``), around a worker's whole life (``worker``), around a step (``step``), around a compiled call (``call``).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


class Strategy:
    """The control: threads call their compiled functions and nothing protects them."""

    name = "none"
    idea = "nothing: every thread calls its compiled functions"

    def prepare(self) -> None:
        """Runs once in the main thread, before anything compiles."""

    def warm_up(self, run_once: Callable[[], None]) -> None:
        """Runs once in the main thread, before the workers start; ``run_once`` is one step of the model."""

    def worker(self) -> AbstractContextManager[Any]:
        """Surrounds everything a worker thread does."""
        return contextlib.nullcontext()

    def step(self, lane: str) -> AbstractContextManager[Any]:
        """Surrounds one step of a lane: forward, backward, optimizer."""
        return contextlib.nullcontext()

    def call(self, lane: str) -> AbstractContextManager[Any]:
        """Surrounds one call of a compiled function."""
        return contextlib.nullcontext()


class _FirstTime:
    """A lock that each lane takes only the first time it comes by."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, lane: str) -> Iterator[None]:
        if lane in self._seen:
            yield
            return
        with self._lock:
            try:
                yield
            finally:
                self._seen.add(lane)


class ExecLock(Strategy):
    """The first attempt: one lock around each thread's very first compiled call."""

    name = "exec_lock"
    idea = "a lock around each thread's first compiled call"

    def __init__(self) -> None:
        self._first = _FirstTime()

    def call(self, lane: str) -> AbstractContextManager[Any]:
        return self._first(lane)


class WarmupLock(Strategy):
    """The second attempt: one lock around each thread's whole first forward and backward."""

    name = "warmup_lock"
    idea = "a lock around each thread's whole first step"

    def __init__(self) -> None:
        self._first = _FirstTime()

    def step(self, lane: str) -> AbstractContextManager[Any]:
        return self._first(lane)


class MainThreadWarmup(Strategy):
    """The third attempt: the coordinator runs the model once in the main thread before the workers start."""

    name = "main_thread_warmup"
    idea = "the model runs once in the main thread before the workers start"

    def warm_up(self, run_once: Callable[[], None]) -> None:
        run_once()

    @staticmethod
    def stays_in_main() -> list[str]:
        """Settings and modes that a coordinator may set up and a worker does not get: each is set here, read there."""
        import torch

        config: Any = torch._dynamo.config
        limit = config.recompile_limit
        config.recompile_limit = limit + 77
        here: dict[str, Any] = {}
        there: dict[str, Any] = {}

        def read(into: dict[str, Any]) -> None:
            into["recompile_limit"] = config.recompile_limit
            into["autocast"] = torch.is_autocast_enabled("cpu")
            into["grad mode"] = torch.is_grad_enabled()
            into["default device"] = str(torch.get_default_device())
            if torch.cuda.device_count() > 1:
                into["cuda device"] = torch.cuda.current_device()

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.device("meta"))
            if torch.cuda.device_count() > 1:
                stack.enter_context(torch.cuda.device(1))
            read(here)
            thread = threading.Thread(target=read, args=(there,))
            thread.start()
            thread.join()
        config.recompile_limit = limit
        return sorted(name for name in here if here[name] != there[name])


class _WrappedModule(types.ModuleType):
    """A stand-in for ``torch.fx._symbolic_trace`` whose tracing flag is thread-local; all else is the real module's."""

    FLAG = "_is_fx_tracing_flag"

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__(real.__name__, real.__doc__)
        object.__setattr__(self, "real", real)
        object.__setattr__(self, "local", threading.local())

    def __getattr__(self, name: str) -> Any:
        if name == _WrappedModule.FLAG:
            return getattr(self.local, "flag", False)
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == _WrappedModule.FLAG:
            self.local.flag = value
        else:
            setattr(self.real, name, value)


class ModuleWrapper(Strategy):
    """Half of the right idea: the module in ``sys.modules`` is replaced by one with a thread-local flag.

    ``Tracer.trace`` says ``global _is_fx_tracing_flag``: it writes the dictionary its function was made in, which is
    the real module's. Nobody who reads or writes through that dictionary ever meets the wrapper.
    """

    name = "module_wrapper"
    idea = "sys.modules holds a stand-in whose flag is thread-local"

    def __init__(self) -> None:
        self.wrapper: _WrappedModule | None = None

    def prepare(self) -> None:
        import torch.fx

        self.wrapper = _WrappedModule(sys.modules["torch.fx._symbolic_trace"])
        sys.modules["torch.fx._symbolic_trace"] = self.wrapper
        torch.fx._symbolic_trace = self.wrapper  # type: ignore[assignment]

    def reaches_the_tracer(self) -> bool | None:
        """Whether the stand-in's flag is the one that a trace sets; None where torch has no such global (2.14 on)."""
        import torch

        assert self.wrapper is not None, "prepare() comes first"
        wrapper = self.wrapper
        if not hasattr(wrapper.real, _WrappedModule.FLAG):
            return None
        seen: dict[str, bool] = {}

        def traced(x: Any) -> Any:
            seen["wrapper"] = bool(getattr(wrapper, _WrappedModule.FLAG))
            seen["real"] = bool(getattr(wrapper.real, _WrappedModule.FLAG))
            return x

        torch.fx.symbolic_trace(traced)
        return seen["wrapper"] and not seen["real"]


class ThreadLocal(Strategy):
    """What holds: tracing and compiling state belongs to the thread that traces or compiles."""

    name = "thread_local"
    idea = "dflash_lib.fx_patch: every thread has its own tracing and compiling state"

    def prepare(self) -> None:
        from dflash_lib import fx_patch

        fx_patch.install()

    def worker(self) -> AbstractContextManager[Any]:
        from dflash_lib import fx_patch

        return fx_patch.worker_context()


CLASSES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (Strategy, ExecLock, WarmupLock, MainThreadWarmup, ModuleWrapper, ThreadLocal)
}
