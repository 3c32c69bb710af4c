"""Settings and limits: what threads do not inherit, and what they share through code objects and names."""

from __future__ import annotations

import ast
import contextvars
import copy
import gc
import sys
import threading
import types
import weakref
from typing import Any

from dflash_lib.hazard import Hazard, PerThreadHazard
from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.rewriting import UnknownInternals, rewrite, take_back


class InheritedSettings(Hazard):
    name = "inherited-settings"
    description = "a new thread has torch's default compile settings, whatever the thread that starts it has set"
    where = "torch._dynamo.config, torch._inductor.config, ...: context variables from 2.12 on"

    def __init__(self) -> None:
        self._start: Any = None

    def present(self) -> bool:
        return _setting_is_context_variable()

    def isolate(self) -> None:
        """``threading.Thread.start`` hands the starting thread's compile settings (and nothing else) to the new one."""
        original = self._start = threading.Thread.start

        def start(self: threading.Thread) -> None:
            settings = _settings_of_this_thread()
            if settings and "run" not in vars(self):
                run = self.run

                def run_with_settings() -> None:
                    del self.run  # type: ignore[method-assign]
                    for variable, value in settings:
                        variable.set(value)
                    run()

                self.run = run_with_settings  # type: ignore[method-assign]
            original(self)

        threading.Thread.start = start  # type: ignore[method-assign]

    def undo(self) -> None:
        if self._start is not None:
            threading.Thread.start = self._start  # type: ignore[method-assign]
            self._start = None


def _setting_is_context_variable() -> bool:
    from torch._dynamo import config

    try:
        value = vars(config)["_config"]["recompile_limit"].user_override
    except (AttributeError, KeyError):
        raise UnknownInternals("torch._dynamo.config._config['recompile_limit'].user_override") from None
    return isinstance(value, contextvars.ContextVar)


def _settings_of_this_thread() -> list[tuple[contextvars.ContextVar[Any], Any]]:
    """Each compile setting that the calling thread has changed, with a copy of its value."""
    context = contextvars.copy_context()
    if not len(context):
        return []
    settings = []
    for module in list(sys.modules.values()):
        if not type(module).__name__.startswith("ConfigModule"):
            continue
        for entry in vars(module).get("_config", {}).values():
            variable = getattr(entry, "user_override", None)
            if isinstance(variable, contextvars.ContextVar) and variable in context:
                settings.append((variable, copy.deepcopy(context[variable])))
    return settings


class DynamicSettings(Hazard):
    name = "dynamic-settings"
    description = (
        "torch.compile(dynamic=...) changes process-wide settings around every call; two threads that overlap leave "
        "them changed, and compile with each other's (up to 2.11)"
    )
    where = "torch.utils._config_module.ConfigModule._make_closure_patcher"

    def __init__(self) -> None:
        self._entries: Any = None

    def present(self) -> bool:
        from torch.utils._config_module import ConfigModule

        if not hasattr(ConfigModule, "_make_closure_patcher"):
            raise UnknownInternals(self.where)
        return not _setting_is_context_variable()

    def isolate(self) -> None:
        """What such a call changes is the calling thread's; what a program sets stays everybody's."""
        from torch.utils import _config_module

        entries: Any = _config_module._ConfigEntry
        self._entries = entries
        per_thread = type("PerThreadEntry", (entries,), {"user_override": property(_own_or_shared, _set_shared)})
        self._per_thread = per_thread
        entries.thread_override = property(_own, lambda entry, value: _set_own(entry, value, per_thread))
        rewrite(
            self, _config_module.ConfigModule._make_closure_patcher, _to_thread_override, None, makes_functions=True
        )

    def undo(self) -> None:
        if self._entries is None:
            return
        take_back(self)
        del self._entries.thread_override
        for entry in gc.get_referrers(self._per_thread):
            if isinstance(entry, self._per_thread):
                entry.__class__ = self._entries
        self._entries = None


class _OwnValues(threading.local):
    """What the calling thread's compiled calls have changed: id of the entry -> value."""

    def __init__(self) -> None:
        self.of: dict[int, Any] = {}


_NOTHING = object()
_own_values = _OwnValues()


def _own(entry: Any) -> Any:
    return _own_values.of.get(id(entry), _NOTHING)


def _set_own(entry: Any, value: Any, per_thread: type) -> None:
    if type(entry) is not per_thread:
        entry.__class__ = per_thread
    if value is _NOTHING:
        _own_values.of.pop(id(entry), None)
    else:
        _own_values.of[id(entry)] = value


def _own_or_shared(entry: Any) -> Any:
    own = _own(entry)
    if own is not _NOTHING:
        return own
    usual: Any = type(entry).__base__
    return vars(entry).get("user_override", usual.user_override)


def _set_shared(entry: Any, value: Any) -> None:
    if _own(entry) is not _NOTHING:
        _own_values.of[id(entry)] = value
    else:
        vars(entry)["user_override"] = value


def _to_thread_override(definition: Any, constant: Any) -> None:
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and node.attr == "user_override":
            node.attr = "thread_override"


class AutomaticDynamic(PerThreadHazard):
    name = "automatic-dynamic"
    description = (
        "lengths that one thread has seen make another thread's first compile dynamic, because what was learned is "
        "kept by file, line and name"
    )
    where = "torch._dynamo.pgo._CODE_STATE"

    def __init__(self) -> None:
        super().__init__(PerThreadGlobals("torch._dynamo.pgo", {"_CODE_STATE": None, "_INIT_CODE_STATE": None}))


class RecompileLimit(Hazard):
    name = "recompile-limit"
    description = (
        "the recompile limit counts the compiles of all threads together; past it a function runs eagerly, with one "
        "warning"
    )
    where = "torch._dynamo.convert_frame.compute_cache_size"

    def __init__(self) -> None:
        self._original: Any = None
        self._handle: Any = None

    def present(self) -> bool:
        from torch._dynamo import cache_size, convert_frame

        for module, name in (
            (convert_frame, "compute_cache_size"),
            (convert_frame, "register_bytecode_hook"),
            (cache_size, "_has_same_id_matched_objs"),
            (cache_size.CacheSizeRelevantForFrame, "will_compilation_exceed_specific_limit"),
        ):
            if not hasattr(module, name):
                raise UnknownInternals(f"torch._dynamo.{module.__name__.rpartition('.')[2]}.{name}")
        return True

    def isolate(self) -> None:
        """A thread's compile is held against the compiles of that thread only; the total cap stays shared."""
        from torch._dynamo import cache_size, convert_frame

        original = self._original = convert_frame.compute_cache_size
        makers = _Makers()
        counted = cache_size.CacheSizeRelevantForFrame

        class OwnCacheSize(counted):  # type: ignore[misc, valid-type]
            others = 0

            def will_compilation_exceed(self, limit: int) -> bool:
                # Asks "is this a recompile?": of the code object, whoever compiled it before.
                return counted.will_compilation_exceed_specific_limit(self, limit) or (
                    self.will_compilation_exceed_accumulated_limit()
                )

            def will_compilation_exceed_specific_limit(self, limit: int) -> bool:
                return bool(self.num_cache_entries_with_same_id_matched_objs - self.others >= limit)

        def compute_cache_size(frame: Any, entries: Any, *rest: Any) -> Any:
            size = OwnCacheSize(**vars(original(frame, entries, *rest)))
            size.others = sum(
                makers.is_another(entry.code) and cache_size._has_same_id_matched_objs(frame, entry)
                for entry in _listed(entries)
            )
            return size

        self._handle = convert_frame.register_bytecode_hook(makers.note)
        convert_frame.compute_cache_size = compute_cache_size  # type: ignore[assignment]

    def undo(self) -> None:
        if self._original is not None:
            from torch._dynamo import convert_frame

            convert_frame.compute_cache_size = self._original
            self._handle.remove()
            self._original = self._handle = None


def _listed(entries: Any) -> list[Any]:
    """Cache entries as a list: releases before 2.12 hand out the first of a chain."""
    if isinstance(entries, (list, tuple)):
        return list(entries)
    listed = []
    while entries is not None:
        listed.append(entries)
        entries = entries.next
    return listed


class _Makers:
    """Which thread compiled which code object (by identity: equal code of two threads is not the same)."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Any], object]] = {}
        self._me = type("Me", (threading.local,), {"__init__": lambda self: setattr(self, "token", object())})()

    def note(self, code: types.CodeType, new_code: types.CodeType) -> None:
        """A hook that Dynamo calls in the compiling thread for every new code object."""
        number = id(new_code)
        self._of[number] = (weakref.ref(new_code, lambda _: self._of.pop(number, None)), self._me.token)

    def is_another(self, compiled: Any) -> bool:
        """Whether a thread other than the calling one is known to have compiled this."""
        known = self._of.get(id(compiled))
        return known is not None and known[0]() is compiled and known[1] is not self._me.token
