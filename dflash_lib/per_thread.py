"""Turns a module's global variables into per-thread ones, without replacing the module or any of its functions.

Torch keeps state such as "somebody is tracing" in plain module globals. Three kinds of code touch one: functions of
the module that read it, functions of the module that write it (``global flag``), and code elsewhere that goes through
an attribute of the module (``module.flag = True``). :class:`PerThreadGlobals` reaches all three:

* the module's own functions get a new ``__code__``, compiled from their own source with every use of the variable
  turned into an attribute of one ``threading.local`` (the function objects stay, because Dynamo recognises many of
  them by identity, and so does whoever imported or captured them earlier);
* code elsewhere meets a property: the module's ``__class__`` becomes a subclass of it that has one per variable.

The ``threading.local`` travels inside the code object as a constant, so nothing is added to the module's namespace
and a frame that was running while isolation was taken off still finds its state.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import inspect
import textwrap
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_PLACEHOLDER = "<dflash_lib: per-thread state>"
_FUTURE_FLAGS = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


class UnknownInternals(RuntimeError):
    """This torch does not look like any that isolation was written for; the message names what was looked for."""

    def __init__(self, attribute: str, problem: str = "is missing") -> None:
        import torch

        super().__init__(
            f"{attribute} {problem} in torch {torch.__version__}: dflash_lib cannot isolate threads on this release"
        )


class PerThreadGlobals:
    """Some global variables of one module, of which every thread then has its own.

    Args:
        module: dotted name, for example ``"torch.compiler"``.
        defaults: variable -> the value a thread starts with.

    ``install`` and ``uninstall`` may be repeated; callers serialise them (see fx_patch).
    """

    def __init__(self, module: str, defaults: Mapping[str, Any]) -> None:
        self.module_name = module
        self.defaults = dict(defaults)
        self.state: Any = None
        self._swapped: list[tuple[types.FunctionType, types.CodeType]] = []

    @property
    def installed(self) -> bool:
        return self.state is not None

    def missing(self) -> list[str]:
        """The variables that the module does not have (an empty list while installed)."""
        module = importlib.import_module(self.module_name)
        return [name for name in self.defaults if not self.installed and name not in vars(module)]

    def install(self) -> None:
        """Gives every thread its own variables.

        Raises:
            UnknownInternals: a variable does not exist, or no function of the module uses it.
        """
        if self.installed:
            return
        module = importlib.import_module(self.module_name)
        for name in self.missing():
            raise UnknownInternals(f"{self.module_name}.{name}")
        names = frozenset(self.defaults)
        users = [function for function in functions_of(module) if uses(function.__code__) & names]
        unused = names - frozenset().union(*(uses(function.__code__) for function in users))
        for name in sorted(unused):
            raise UnknownInternals(f"{self.module_name}.{name}", "is used by no function of its module")

        state = type("PerThread", (threading.local,), dict(self.defaults))()
        codes = [rewrite(function, lambda tree: _ToState(names).visit(tree), state) for function in users]
        properties = {name: _property(state, name) for name in names}
        # Nothing has changed up to here, so an error above leaves torch as it was.
        self.state = state
        self._swapped = swap_codes(users, codes)
        _add_properties(module, properties)

    def uninstall(self) -> None:
        """Puts back the module's class, the functions' code and the variables' first values."""
        if not self.installed:
            return
        module = importlib.import_module(self.module_name)
        _remove_properties(module, self.defaults)
        restore_codes(self._swapped)
        vars(module).update(self.defaults)
        self.state = None


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Every function that a module defines: plain ones, methods, and what decorators wrap; each once."""
    seen: set[int] = set()
    pending: list[Any] = list(vars(module).values())
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            pending.extend(vars(thing).values())
        elif isinstance(thing, (staticmethod, classmethod)):
            pending.append(thing.__func__)
        elif isinstance(thing, property):
            pending.extend(part for part in (thing.fget, thing.fset, thing.fdel) if part)
        elif isinstance(thing, types.FunctionType) and thing.__globals__ is vars(module):
            yield thing
        if not isinstance(thing, types.ModuleType) and "__wrapped__" in getattr(thing, "__dict__", {}):
            pending.append(thing.__wrapped__)


@functools.cache
def uses(code: types.CodeType) -> frozenset[str]:
    """The global (and attribute) names that a function's code mentions, nested functions included."""
    nested = [uses(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*nested)


def rewrite(function: types.FunctionType, transform: Callable[[ast.AST], ast.AST], state: Any) -> types.CodeType:
    """Compiles a function's own source again, changed by ``transform``, with ``state`` as a constant.

    Args:
        function: its source is read from its file; line numbers stay what they were.
        transform: gets the tree of the one function; writes ``state_constant()`` where it wants ``state``.
        state: the object that those become.

    Returns:
        A code object that can stand in for ``function.__code__``: same name, arguments and free variables.

    Raises:
        UnknownInternals: the source is not to be had, or the new code does not fit the function.
    """
    code = function.__code__
    label = f"{function.__module__}.{function.__qualname__}"
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        raise UnknownInternals(label, "has no source to read") from None
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.name != code.co_name:
        raise UnknownInternals(label, "is not written the way its code says")
    definition.decorator_list = []
    transform(definition)
    # Inside a class of the same name, private names are mangled and qualified names built as they were.
    for owner in reversed(code.co_qualname.split(".")[:-1]):
        tree.body = [ast.ClassDef(name=owner, bases=[], keywords=[], body=tree.body, decorator_list=[])]
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    compiled = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FUTURE_FLAGS, dont_inherit=True)
    new = next(found for found in _codes(compiled) if found.co_qualname == code.co_qualname)
    same = ("co_freevars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags")
    if any(getattr(new, field) != getattr(code, field) for field in same):
        raise UnknownInternals(label, "cannot be compiled again")
    return _with_constant(new, state)


def state_constant() -> ast.expr:
    """What a transform puts where it wants the state object of :func:`rewrite`."""
    return ast.Constant(_PLACEHOLDER)


def swap_codes(functions: list[types.FunctionType], codes: list[types.CodeType]) -> list[tuple[Any, Any]]:
    """Gives each function its new code; returns what :func:`restore_codes` needs."""
    before = [(function, function.__code__) for function in functions]
    for function, code in zip(functions, codes, strict=True):
        function.__code__ = code
    return before


def restore_codes(before: list[tuple[Any, Any]]) -> None:
    """Undoes :func:`swap_codes` and empties the list."""
    for function, code in before:
        function.__code__ = code
    before.clear()


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


class _ToState(ast.NodeTransformer):
    """``flag`` becomes ``<state>.flag``, read, written or deleted; ``global flag`` goes."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        return ast.copy_location(ast.Attribute(value=state_constant(), attr=node.id, ctx=node.ctx), node)

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        kept = [name for name in node.names if name not in self.names]
        return ast.copy_location(ast.Global(kept) if kept else ast.Pass(), node)


def _property(state: Any, name: str) -> property:
    return property(lambda _: getattr(state, name), lambda _, value: setattr(state, name, value))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _with_constant(code: types.CodeType, state: Any) -> types.CodeType:
    def changed(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _with_constant(constant, state)
        return state if isinstance(constant, str) and constant == _PLACEHOLDER else constant

    return code.replace(co_consts=tuple(changed(constant) for constant in code.co_consts))
