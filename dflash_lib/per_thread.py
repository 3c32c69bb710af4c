"""Turns a module's global variables into per-thread ones, without replacing the module or any of its functions.

Torch keeps state such as "somebody is tracing" in plain module globals. Three kinds of code touch one: functions of
the module that read it, functions of the module that write it (``global flag``), and code elsewhere that goes through
an attribute of the module (``module.flag = True``). :class:`PerThreadGlobals` reaches all three: the module's own
functions are rewritten so that they use one ``threading.local`` (see rewriting), and code elsewhere meets a property,
because the module's ``__class__`` becomes a subclass of it that has one per variable.
"""

from __future__ import annotations

import ast
import copy
import importlib
import threading
import types
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_lib.rewriting import (
    Constant,
    UnknownInternals,
    functions_of,
    names_in,
    plain_for_dynamo,
    rewrite,
    take_back,
    torchs_own,
)


class PerThreadGlobals:
    """Some global variables of one module, of which every thread then has its own.

    Args:
        module: dotted name, for example ``"torch.compiler"``.
        defaults: variable -> the value a thread starts with (copied for each thread).
        heal: whether the variables may be stuck at a wrong value, which is then corrected for good.

    Each ``install`` wants one ``uninstall`` (two hazards may share an object); callers serialise them (see fx_patch).
    """

    def __init__(self, module: str, defaults: Mapping[str, Any], *, heal: bool = False) -> None:
        self.module_name = module
        self.defaults = dict(defaults)
        self.state: Any = None
        self._heal = heal
        self._users = 0

    @property
    def installed(self) -> bool:
        return self.state is not None

    def missing(self) -> list[str]:
        """Names as ``module.variable`` of the variables that this torch does not have."""
        module = importlib.import_module(self.module_name)
        return [f"{self.module_name}.{name}" for name in self.defaults if name not in vars(module)]

    def install(self) -> None:
        """Gives every thread its own variables.

        Raises:
            UnknownInternals: a variable does not exist, or no function of the module uses it.
        """
        self._users += 1
        if self._users > 1:
            return
        try:
            self._install()
        except BaseException:
            self._users -= 1
            raise

    def _install(self) -> None:
        for name in self.missing():
            raise UnknownInternals(name)
        module = importlib.import_module(self.module_name)
        names = frozenset(self.defaults)
        users = [function for function in functions_of(module) if names_in(torchs_own(function)) & names]
        for name in sorted(names.difference(*(names_in(torchs_own(function)) for function in users))):
            raise UnknownInternals(f"{self.module_name}.{name}", "is used by no function of its module")

        state = _new_state(self.defaults)
        folded = _folded_by_dynamo()
        try:
            for function in users:
                transform = _ToState(names)
                rewrite(self, function, transform if function in folded else plain_for_dynamo(transform), state)
        except BaseException:
            take_back(self)
            raise
        if self._heal:
            vars(module).update(self.defaults)
        else:
            for name in names:
                setattr(state, name, vars(module)[name])  # the calling thread goes on with the value it had
        self.state = state
        _add_properties(module, {name: _property(state, name) for name in names})

    def uninstall(self) -> None:
        """With the last user: puts back the module's class and the functions' code; the variables are its own again."""
        self._users -= 1
        if self._users:
            return
        _remove_properties(importlib.import_module(self.module_name), self.defaults)
        take_back(self)
        self.state = None


def _new_state(defaults: Mapping[str, Any]) -> Any:
    """A threading.local whose attributes start, in each thread, as copies of ``defaults``."""

    def start(self: Any) -> None:
        vars(self).update({name: copy.copy(value) for name, value in defaults.items()})

    return type("PerThread", (threading.local,), {"__init__": start})()


def _folded_by_dynamo() -> set[Any]:
    """Functions that Dynamo answers by itself, so that it never looks into them."""
    from torch._dynamo.variables import torch as rules

    return set(getattr(rules, "tracing_state_functions", dict)())


class _ToState(ast.NodeTransformer):
    """``flag`` becomes ``<state>.flag``, read, written or deleted; ``global flag`` goes."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def __call__(self, definition: ast.FunctionDef, constant: Constant) -> None:
        self.constant = constant
        definition.body = [self.visit(statement) for statement in definition.body]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        return ast.copy_location(ast.Attribute(value=self.constant(), attr=node.id, ctx=node.ctx), node)

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        kept = [name for name in node.names if name not in self.names]
        return ast.copy_location(ast.Global(kept) if kept else ast.Pass(), node)


_original_classes: dict[types.ModuleType, type] = {}


def _add_properties(module: types.ModuleType, properties: Mapping[str, property]) -> None:
    """Lets attribute access to ``module`` meet these, through a class that this one module has for the time."""
    if module not in _original_classes:
        original = _original_classes[module] = type(module)
        module.__class__ = type(original.__name__, (original,), {"__module__": original.__module__})
    for name, value in properties.items():
        setattr(type(module), name, value)


def _remove_properties(module: types.ModuleType, names: Iterable[str]) -> None:
    """Undoes :func:`_add_properties`; the module's first class comes back with the last one."""
    for name in names:
        delattr(type(module), name)
    if not any(isinstance(value, property) for value in vars(type(module)).values()):
        module.__class__ = _original_classes.pop(module)


def _property(state: Any, name: str) -> property:
    return property(lambda _: getattr(state, name), lambda _, value: setattr(state, name, value))
