"""nn.Module methods, and functions given to torch.fx.wrap, that are patched for everybody while anybody traces."""

from __future__ import annotations

import ast
import builtins
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

from dflash_lib.hazard import Hazard
from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.rewriting import Constant, UnknownInternals, compiled


class ModuleCalls(Hazard):
    name = "module-calls"
    description = (
        "while one thread traces, every thread's nn.Module calls enter its tracer ('module is not installed as a "
        "submodule'); a compile undoes another thread's trace; two traces at once leave nn.Module patched for good"
    )
    where = "torch.nn.Module.__call__ / __getattr__, torch.fx._symbolic_trace.CURRENT_PATCHER, _Patcher"

    def __init__(self) -> None:
        self._globals = PerThreadGlobals("torch.fx._symbolic_trace", {"CURRENT_PATCHER": None}, heal=True)
        self._before: list[tuple[Any, str, Any]] = []

    def present(self) -> bool:
        for name in ("_Patcher", "_new_patcher", "_autowrap_check", "_patch_wrapped_functions", "_orig_module_call"):
            if not hasattr(symbolic_trace, name):
                raise UnknownInternals(f"torch.fx._symbolic_trace.{name}")
        for name in self._globals.missing():
            raise UnknownInternals(name)
        return True

    def isolate(self) -> None:
        self.present()
        calls = [_CodeSwitch(symbolic_trace._orig_module_call), _CodeSwitch(symbolic_trace._orig_module_getattr)]
        _heal()
        self._globals.install()
        switches = _Switches(calls)
        for owner, name, value in (
            # Inside a trace "the original" must not enter the tracer again.
            (symbolic_trace, "_orig_module_call", calls[0].undispatched),
            (symbolic_trace, "_orig_module_getattr", calls[1].undispatched),
            (symbolic_trace, "_patch_wrapped_functions", switches.patch_wrapped_functions),
            (symbolic_trace, "_autowrap_check", switches.autowrap_check),
            (symbolic_trace._Patcher, "patch", switches.patch),
            (symbolic_trace._Patcher, "patch_method", switches.patch_method),
        ):
            self._before.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)

    def undo(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            setattr(owner, name, value)
        if self._globals.installed:
            self._globals.uninstall()


def _heal() -> None:
    """Takes off what two overlapping traces have left on nn.Module (nobody traces now: fx_patch sees to it)."""
    for name, original in (
        ("__call__", symbolic_trace._orig_module_call),
        ("__getattr__", symbolic_trace._orig_module_getattr),
    ):
        current = vars(torch.nn.Module)[name]
        if current is not original and getattr(current, "__globals__", None) is vars(symbolic_trace):
            setattr(torch.nn.Module, name, original)


class _Switch:
    """A place (a class attribute or a module global) that calls something else in the threads that trace.

    The place itself is changed while at least one thread has an override there, and is what it was otherwise.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self.state: Any = type("Override", (threading.local,), {"top": None, "stack": None})()

    def push(self, override: Callable[..., Any]) -> None:
        """Overrides the place for the calling thread."""
        self.state.stack = [*(self.state.stack or ()), override]
        self.state.top = override
        with self._lock:
            self._active += 1
            if self._active == 1:
                self.turn_on()

    def remove(self, override: Callable[..., Any]) -> None:
        """Takes that override of the calling thread off again, whichever place in its stack it has."""
        stack = list(self.state.stack or ())
        if override not in stack:
            return
        stack.reverse()
        stack.remove(override)
        stack.reverse()
        self.state.stack = stack
        self.state.top = stack[-1] if stack else None
        with self._lock:
            self._active -= 1
            if self._active == 0:
                self.turn_off()

    def turn_on(self) -> None:
        raise NotImplementedError

    def turn_off(self) -> None:
        raise NotImplementedError


class _CodeSwitch(_Switch):
    """nn.Module.__call__ or __getattr__: its code is swapped, so that it stays the function Dynamo knows.

    Dynamo short-circuits these two by identity, and reads the code only for modules with hooks; then it folds the
    test below to False and sees the original code.
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self._plain = function.__code__
        self._dispatching = compiled(function, self._plain, [(self, _override_first, self.state)])
        self.undispatched = types.FunctionType(
            self._plain, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        functools.update_wrapper(self.undispatched, function)
        del vars(self.undispatched)["__wrapped__"]

    def turn_on(self) -> None:
        self.function.__code__ = self._dispatching

    def turn_off(self) -> None:
        self.function.__code__ = self._plain


def _override_first(definition: ast.FunctionDef, constant: Constant) -> None:
    """Puts "if this thread overrides, call that" in front of a method's body."""
    given = [argument.arg for argument in definition.args.args]
    given += [f"*{definition.args.vararg.arg}"] if definition.args.vararg else []
    given += [f"**{definition.args.kwarg.arg}"] if definition.args.kwarg else []
    head = ast.parse(
        "if not torch.compiler.is_dynamo_compiling():\n"
        "    dflash_override = STATE.top\n"
        "    if dflash_override is not None:\n"
        f"        return dflash_override({', '.join(given)})\n"
    ).body
    for node in ast.walk(head[0]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "STATE":
            node.value = constant()
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = definition.lineno  # type: ignore[attr-defined]
    definition.body[:0] = head


class _AttributeSwitch(_Switch):
    """Any other class attribute or module global that a tracer replaces (functions given to torch.fx.wrap)."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], clear: Callable[[], None] | None) -> None:
        super().__init__()
        self._write, self._clear = write, clear
        self.original = original = read()
        state = self.state

        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return (state.top or original)(*args, **kwargs)

        dispatch.dflash_original = original  # type: ignore[attr-defined]
        dispatch._torchdynamo_inline = original  # type: ignore[attr-defined]  # a compile beside a trace sees through
        self._dispatch = dispatch

    def turn_on(self) -> None:
        self._write(self._dispatch)

    def turn_off(self) -> None:
        if self._clear is None:
            self._write(self.original)
        else:
            self._clear()


class _Patched:
    """One change that one trace made: what torch's ``_PatchedFn`` is, for the calling thread only."""

    def __init__(self, switch: _Switch, override: Callable[..., Any]) -> None:
        self._switch, self._override = switch, override

    def patch(self) -> None:
        self._switch.push(self._override)

    def revert(self) -> None:
        self._switch.remove(self._override)


class _Switches:
    """Torch's patching of functions while it traces, for the tracing thread only."""

    def __init__(self, calls: list[_CodeSwitch]) -> None:
        self._lock = threading.Lock()
        self._by_place: dict[tuple[int, str], _AttributeSwitch] = {}
        switches = self

        def patch(self: Any, frame_dict: dict[str, Any], name: str, new_fn: Any, deduplicate: bool = True) -> None:
            if name not in frame_dict and hasattr(builtins, name):
                switch = switches._at(
                    frame_dict,
                    name,
                    read=lambda: getattr(builtins, name),
                    write=lambda value: frame_dict.__setitem__(name, value),
                    clear=lambda: frame_dict.__delitem__(name),
                )
            else:
                switch = switches._at(
                    frame_dict,
                    name,
                    read=lambda: frame_dict[name],
                    write=lambda value: frame_dict.__setitem__(name, value),
                )
            self.patches_made.append(_Patched(switch, new_fn))
            self.patches_made[-1].patch()

        def patch_method(self: Any, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
            current = getattr(cls, name)
            switch: _Switch | None = next((call for call in calls if call.function is current), None)
            if switch is None:
                switch = switches._at(
                    cls, name, read=lambda: getattr(cls, name), write=lambda value: setattr(cls, name, value)
                )
            self.patches_made.append(_Patched(switch, new_fn))
            self.patches_made[-1].patch()

        def autowrap_check(patcher: Any, frame_dict: dict[str, Any], function_ids: set[int]) -> None:
            if not patcher.visit_once(frame_dict):
                return
            for name, value in list(frame_dict.items()):
                function = _seen_through(value)
                if not name.startswith("_") and callable(function) and id(function) in function_ids:
                    patcher.patch(frame_dict, name, symbolic_trace._create_wrapped_func(function))

        def patch_wrapped_functions(patcher: Any) -> None:
            for (_, name), frame_dict in symbolic_trace._wrapped_fns_to_patch.copy().items():
                function = frame_dict[name] if name in frame_dict else getattr(builtins, name)
                patcher.patch(frame_dict, name, symbolic_trace._create_wrapped_func(_seen_through(function)))
            for cls, name in symbolic_trace._wrapped_methods_to_patch:
                patcher.patch_method(cls, name, symbolic_trace._create_wrapped_method(cls, name))

        self.patch, self.patch_method = patch, patch_method
        self.autowrap_check, self.patch_wrapped_functions = autowrap_check, patch_wrapped_functions

    def _at(
        self,
        owner: Any,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        clear: Callable[[], None] | None = None,
    ) -> _AttributeSwitch:
        """The switch of a place; all threads that trace at the same time get the same one."""
        with self._lock:
            place = (id(owner), name)
            switch = self._by_place.get(place)
            if switch is None or switch._active == 0:
                switch = self._by_place[place] = _AttributeSwitch(read, write, clear)
            return switch


def _seen_through(function: Any) -> Any:
    """The function itself, where another thread's trace has put a dispatching one for the time."""
    return getattr(function, "dflash_original", function)
