"""What a thread that compiles needs of its own: copied settings, backward in the same thread, its own code objects."""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def worker_context() -> Iterator[None]:
    """Everything a thread needs around its whole work; enter it at the top of the thread.

    Backward runs in this thread instead of the device's autograd thread. A backward that is compiled lazily then
    waits for torch's compile lock in the thread that asked for it, so two threads on one GPU cannot wait for each
    other, and its compile events, settings and errors belong to the right thread.
    """
    import torch

    with torch.autograd.set_multithreading_enabled(False):
        yield


def run_in_thread(
    target: Callable[..., Any], *args: Any, name: str | None = None, daemon: bool = True, **kwargs: Any
) -> threading.Thread:
    """Starts a thread that has the caller's context variables (torch's compile settings are such, from 2.12 on).

    Args:
        target: called with ``args`` and ``kwargs`` in the new thread.
        name: the thread's name.
        daemon: whether the process may end while it runs.

    Returns:
        The thread, started.
    """
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(target, *args), kwargs=kwargs, name=name, daemon=daemon)
    thread.start()
    return thread


def own_entry_point(function: Callable[..., Any], lane: str) -> Callable[..., Any]:
    """A copy of a function that shares no compile state with it: hand it to torch.compile in the thread ``lane``.

    Dynamo counts recompiles per code object, and keys what it learned about dynamic shapes by file, line and NAME.
    So the copy has a code object of its own, a name of its own, and so have the functions nested in it.

    Args:
        function: a plain Python function or a bound method (the copy stays bound to the same object).
        lane: the thread's name; two copies for different lanes share nothing.

    Raises:
        TypeError: there is no Python code to copy (a built-in, an nn.Module, an already compiled function).
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(own_entry_point(function.__func__, lane), function.__self__)
    if not isinstance(function, types.FunctionType) or hasattr(function, "_torchdynamo_orig_callable"):
        raise TypeError(
            f"own_entry_point: {function!r} has no Python code of its own; "
            "give the plain function or bound method that torch.compile would get"
        )
    suffix = "_" + re.sub(r"\W", "_", lane)
    copy = types.FunctionType(
        _renamed(function.__code__, suffix),
        function.__globals__,
        function.__name__ + suffix,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = dict(function.__kwdefaults__) if function.__kwdefaults__ else None
    copy.__annotations__ = dict(function.__annotations__)
    copy.__doc__, copy.__module__ = function.__doc__, function.__module__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__ = function.__qualname__ + suffix
    return copy


def _renamed(code: types.CodeType, suffix: str) -> types.CodeType:
    constants = tuple(
        _renamed(constant, suffix) if isinstance(constant, types.CodeType) else constant for constant in code.co_consts
    )
    return code.replace(co_name=code.co_name + suffix, co_qualname=code.co_qualname + suffix, co_consts=constants)
