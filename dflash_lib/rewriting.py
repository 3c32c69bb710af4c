"""Compiles functions of torch again from their own source, changed, and swaps their code; undone exactly.

Swapping ``__code__`` instead of replacing a function keeps its identity: Dynamo recognises many functions by identity,
and other modules have imported or captured them. What the changed code needs at run time travels inside it as a
constant, so nothing is added to the module's namespace, and a frame that is running while the change is taken back
still finds it.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import gc
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Constant = Callable[[], ast.expr]
Transform = Callable[[ast.FunctionDef, Constant], None]

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


@dataclass
class _Rewritten:
    original: types.CodeType
    changes: list[tuple[object, Transform, Any]]
    makes_functions: bool = False


_rewritten: dict[types.FunctionType, _Rewritten] = {}


def rewrite(
    owner: object, function: Any, transform: Transform, constant: Any, *, makes_functions: bool = False
) -> None:
    """Changes a function's code, on top of the changes that others have made to it.

    Args:
        owner: who asks; :func:`take_back` takes back all that this owner asked for, in any order among owners.
        function: a Python function of torch.
        transform: gets the function's tree and a callable that makes an expression standing for ``constant``.
        constant: the object itself, of any type.
        makes_functions: whether functions that ``function`` has made (what a decorator returned, closures) are in
            use and have to get the new inner code too.

    Raises:
        UnknownInternals: the source is not to be had, or the changed code does not fit the function. Nothing
            has changed then.
    """
    entry = _rewritten.get(function) or _Rewritten(torchs_own(function), [])
    changes = [*entry.changes, (owner, transform, constant)]
    code = compiled(function, entry.original, changes)
    entry.changes = changes
    entry.makes_functions |= makes_functions
    _rewritten[function] = entry
    _swap(function, code, entry.makes_functions)


def take_back(owner: object) -> None:
    """Undoes every :func:`rewrite` of this owner; a function nobody changes any more has its very first code."""
    for function, entry in list(_rewritten.items()):
        kept = [change for change in entry.changes if change[0] is not owner]
        if len(kept) == len(entry.changes):
            continue
        entry.changes = kept
        if kept:
            _swap(function, compiled(function, entry.original, kept), entry.makes_functions)
        else:
            _swap(function, entry.original, entry.makes_functions)
            del _rewritten[function]


def compiled(
    function: types.FunctionType, code: types.CodeType, changes: list[tuple[object, Transform, Any]]
) -> types.CodeType:
    """A code object that can stand in for ``code``: its source with these changes; lines stay where they were."""
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
    placeholders: dict[str, Any] = {}
    for number, (_, transform, constant) in enumerate(changes):
        name = f"<dflash_lib constant {number}>"
        placeholders[name] = constant
        transform(definition, functools.partial(ast.Constant, name))
    # Inside a class of the same name, private names are mangled and qualified names built as they were.
    for owner in reversed(code.co_qualname.split(".")[:-1]):
        tree.body = [ast.ClassDef(name=owner, bases=[], keywords=[], body=tree.body, decorator_list=[])]
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    module = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FUTURE_FLAGS, dont_inherit=True)
    new = next(inner for inner in _nested(module) if inner.co_qualname == code.co_qualname)
    fields = ("co_freevars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags")
    unlike = [f"{field} {getattr(new, field)}" for field in fields if getattr(new, field) != getattr(code, field)]
    if unlike:
        raise UnknownInternals(label, f"cannot be compiled again ({', '.join(unlike)})")
    return _with_constants(new, placeholders)


def plain_for_dynamo(transform: Transform) -> Transform:
    """The same change, but a compiled function that calls this one still gets the original body.

    Dynamo inlines some of torch's functions. It folds ``is_dynamo_compiling()`` to True and so never meets the
    constant, which it could not trace.
    """

    def apply(definition: ast.FunctionDef, constant: Constant) -> None:
        declared = _take_globals(definition)
        original = copy.deepcopy(definition.body)
        transform(definition, constant)
        head = ast.parse("import torch\nif torch.compiler.is_dynamo_compiling():\n    pass\nelse:\n    pass").body
        choice = head[1]
        assert isinstance(choice, ast.If)
        choice.body, choice.orelse = original, definition.body
        for node in (*head[:1], choice, *ast.walk(choice.test)):
            node.lineno = node.end_lineno = definition.lineno  # type: ignore[attr-defined]
        definition.body = ([ast.Global(declared)] if declared else []) + head

    return apply


def _take_globals(definition: ast.FunctionDef) -> list[str]:
    """Takes the function's own ``global`` statements out and returns their names."""
    names: list[str] = []

    class Take(ast.NodeTransformer):
        def visit_Global(self, node: ast.Global) -> ast.stmt:
            names.extend(node.names)
            return ast.copy_location(ast.Pass(), node)

        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
            return node  # a nested function has global statements of its own

    definition.body = [Take().visit(statement) for statement in definition.body]
    return sorted(set(names))


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


def torchs_own(function: types.FunctionType) -> types.CodeType:
    """The code that a function has when nothing is rewritten."""
    entry = _rewritten.get(function)
    return entry.original if entry else function.__code__


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The global and attribute names that code mentions, nested functions included."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _swap(function: types.FunctionType, code: types.CodeType, makes_functions: bool) -> None:
    """Gives the function its code and, if asked, the functions it has made the inner code of the same name."""
    if makes_functions:
        inner = {new.co_qualname: new for new in _nested(code)}
        before = {id(old): inner[old.co_qualname] for old in _nested(function.__code__) if old.co_qualname in inner}
        for made in gc.get_referrers(*_nested(function.__code__)):
            if isinstance(made, types.FunctionType) and id(made.__code__) in before:
                made.__code__ = before[id(made.__code__)]
    function.__code__ = code


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _nested(constant)


def _with_constants(code: types.CodeType, placeholders: dict[str, Any]) -> types.CodeType:
    def real(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _with_constants(constant, placeholders)
        return placeholders.get(constant, constant) if isinstance(constant, str) else constant

    return code.replace(co_consts=tuple(real(constant) for constant in code.co_consts))
