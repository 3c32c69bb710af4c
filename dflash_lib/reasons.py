"""What a recompile reason means: the failing guard, expected -> actual, where in the source, and what to do about it.

The texts are Dynamo's (``torch/_dynamo/guards.py`` and its C++ guards), as releases 2.9 to 2.14 write them. A text
nobody has seen before is kept whole and gets the kind "other". No torch here: the timeline reads logs with this.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RACE = "Unexpected recompilation"
DUPLICATE = "another thread compiled the same while this one waited for the compile lock"
LIMIT = re.compile(r"(recompile|cache)[ _](size[ _])?limit", re.IGNORECASE)


@dataclass(frozen=True)
class Reason:
    """A recompile reason, read.

    ``kind`` is one word for comparing and counting; ``guard`` the check that failed; ``source`` "file:line" of the
    user code that caused the guard, where torch says it.
    """

    kind: str
    text: str
    guard: str | None = None
    expected: str | None = None
    actual: str | None = None
    source: str | None = None


# kind -> advice: one line that fits what failed.
ADVICE = {
    "size": "a length changed: pad it to a few buckets, or mark that dimension dynamic (torch._dynamo.mark_dynamic)",
    "stride": "the same shape came with another memory layout: call .contiguous() before the compiled function",
    "rank": "tensors of different rank share one function: give each rank a function of its own, or add the axis",
    "dtype": "the dtype changed: cast before the compiled call, and enter autocast outside it",
    "requires_grad": "the same input came with and without grad: detach it, or keep training and evaluation apart",
    "device": "one code object serves several devices: give each thread its own (fx_patch.own_entry_point)",
    "dispatch_keys": "another kind of tensor (inference mode, a subclass): create inputs in the mode they are used in",
    "grad_mode": "called with and without grad, a graph for each: compile evaluation apart, or keep to one mode",
    "train_mode": "train() and eval() are two graphs: two compiles are normal; more than two: compile evaluation apart",
    "autocast": "autocast was on in one call and off in another, a graph for each: enter it around every call, or none",
    "global_state": "a setting of torch changed between calls: set it once, before the first (fx_patch.run_in_thread"
    " copies it to threads)",
    "constant": "a Python number is baked into the graph: pass it as a tensor, or keep it the same",
    "flag": "a flag or mode is baked into the graph, a graph for each value: keep it, or compile each value apart",
    "attribute": "a number kept on an object is baked into the graph: keep it in a tensor (register_buffer), or count"
    " outside",
    "global": "a global variable is baked into the graph: pass it as an argument (a number as a tensor) or set it once",
    "item": "a number taken out of a tensor (.item()) is baked in after a graph break: keep it a tensor",
    "shape_guard": "a dynamic size left the range the graph holds for: pad to buckets, or mark_dynamic with a max",
    "type": "an argument changed its type (a tensor or None?): an entry point for each of the two",
    "object": "another object of the same kind was passed: keep one alive and reuse it, or pass its values as tensors",
    "deallocated": "the model this was compiled for is gone: keep it alive, or give the new one its own function",
    "aliasing": "the same tensor was passed twice, or no longer is: clone one of them",
    "structure": "a list or dict changed its length or keys: keep its structure fixed, or unpack it before the call",
    "backend": "torch.compile was called again with another backend object: compile once, outside the loop",
    "race": "several threads compiled the same thing at once: give each its own code object (fx_patch.own_entry_point)",
    "limit": "the cache is full, calls run eagerly: mend what filled it, or raise torch._dynamo.config.recompile_limit",
    "graph_break": "Dynamo cannot trace this frame: fullgraph=True names the line, torch.compiler.disable exempts it",
    "failed": "the compile failed: read its error; TORCHDYNAMO_VERBOSE=1 shows where",
    "other": "TORCH_LOGS=recompiles shows every guard that failed",
}


def advice(kind: str, guard: str | None = None) -> str:
    """One line of advice for a kind of reason; with the guard it names the tensor and the dimension."""
    text = ADVICE.get(kind, ADVICE["other"])
    if kind == "size" and (match := re.fullmatch(r"([\w.\[\]'\"]+): size\[(\d+)\]", guard or "")):
        return text.replace("mark_dynamic", f"mark_dynamic({match[1]}, {match[2]})")
    return text


_MISMATCH = re.compile(
    r"(?:Tensor |tensor '(?P<name>.*?)' )?(?P<what>size|stride|rank|dtype|requires_grad|dispatch key set|device index)"
    r" mismatch(?: at index (?P<index>\d+))?\. [Ee]xpected (?:device index to be |requires_grad=)?(?P<expected>.+?)"
    r"[,.] (?:but got |actual |Actual |got )(?:requires_grad=)?(?P<actual>[^\n]+)",
)
_NOT_TYPE = re.compile(r"expected type of '(?P<name>.*?)' to be (?P<expected>.+?),\s*'?\s*but found (?P<actual>.+)")
_SIZE = re.compile(r"[A-Za-z_][\w.\[\]'\"]*\.(?:size|stride)\(\)\[\d+\]|[A-Za-z_][\w.\[\]'\"]*\.storage_offset\(\)")
_ENTRY = re.compile(r"^\s*\[?!?\d+/\d+(_\d+)?\]?:\s*")  # the cache entry that did not fit
_LOCAL = re.compile(r"\bL\[\s*['\"](\w+)['\"]\s*\]")  # Dynamo's name for the local variables of the frame
_GLOBAL = re.compile(r"^G\['(\w+)'\]")  # Dynamo's name for the global variables of the frame
_KINDS = {"dispatch key set": "dispatch_keys", "device index": "device"}
_SOURCE = re.compile(r"#\s*(?P<source>\S[^#\n]*?:\d+) in [^#\n]+$")
_STACK = re.compile(r'User stack trace:\s*\n\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+)')


def parse(text: str, value: Callable[[str], str | None] | None = None) -> Reason:
    """Reads the text of a recompile reason.

    Args:
        text: as torch reports it, with or without its leading "0/3: ".
        value: gives the present value of an expression of the compiled frame (see :func:`frame_value`), as text;
            Dynamo's own text has only what was expected of Python values.
    """
    text = _ENTRY.sub("", text).strip()
    if "L[" in text:
        text = _LOCAL.sub(r"\1", text)
    head = text.split("\nUser stack trace:", 1)[0]
    body, _, comment = head.partition("  #")
    body = body.strip()
    source = _source(text, "#" + comment if comment else head) if "#" in head or "User stack" in text else None

    def reason(kind: str, guard: str | None = body, expected: str | None = None, actual: str | None = None) -> Reason:
        return Reason(kind, text, guard, expected, actual, source)

    if text.startswith((RACE, DUPLICATE)):
        return reason("race", guard=None)
    if match := _MISMATCH.search(head):
        what, index = match["what"], match["index"]
        guard = f"{match['name'] or 'tensor'}: {what}" + (f"[{index}]" if index else "")
        return reason(_KINDS.get(what, what), guard, match["expected"].strip(), match["actual"].strip())
    if match := re.match(r"tensor '(.*?)' requires_grad mismatch\. expected requires_grad=(0|1)$", body):
        wanted = match[2] == "1"
        return reason("requires_grad", f"{match[1]}: requires_grad", str(wanted), str(not wanted))
    if match := _NOT_TYPE.match(body):
        return reason("type", f"type({match['name']})", _class_name(match["expected"]), _class_name(match["actual"]))
    if body.startswith("GLOBAL_STATE changed"):
        names = body.partition(":")[2].split()
        kind = "grad_mode" if names == ["grad_mode"] else "global_state"
        if names and all(name.startswith("autocast") for name in names):
            kind = "autocast"
        now = value(f"<global>.{names[0]}") if value and names else None
        before = {"True": "False", "False": "True"}.get(now or "")
        return reason(kind, " ".join(names) or "global state", before, now)
    for pattern, kind in (
        ("BACKEND_MATCH", "backend"),
        ("deallocated", "deallocated"),
        ("invalidated", "deallocated"),
        ("Duplicate tensor", "aliasing"),
    ):
        if pattern in body:
            return reason(kind)
    return _expression(body, reason, value)


def _expression(body: str, reason: Callable[..., Reason], value: Callable[[str], str | None] | None) -> Reason:
    """A guard written as a Python expression: ``k == 2``, ``2 <= x.size()[0]``, ``___check_type_id(x, 140...)``."""
    now = value or (lambda _: None)
    if match := re.match(r"(?:not )?___(check_type_id|check_obj_id)\((.+?),", body):
        if match[1] == "check_type_id":
            named = re.search(r"type=<class '([^']+)'>", body)
            return reason("type", f"type({match[2]})", named[1] if named else None, now(f"type({match[2]})"))
        return reason("object", f"{match[2]} is the same object")
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return reason("other", guard=body or None)
    if sizes := dict.fromkeys(_SIZE.findall(body)):
        found = [f"{size} = {now(size)}" for size in sizes if now(size) is not None]
        return reason("shape_guard", body, body, ", ".join(found) or None)
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
        left, right = ast.unparse(tree.left), ast.unparse(tree.comparators[0])
        if isinstance(tree.left, ast.Constant) and not isinstance(tree.comparators[0], ast.Constant):
            left, right = right, left
        if isinstance(tree.ops[0], (ast.Eq, ast.NotEq)):
            # Of a dict's length Dynamo writes what is wrong ("len(d) != 2"), of all else what was expected.
            same = isinstance(tree.ops[0], ast.Eq) or left.startswith("len(")
            return reason(_kind_of(left, right), body, right if same else f"not {right}", now(left))
        if isinstance(tree.ops[0], (ast.Is, ast.IsNot)):
            kind = "type" if right == "None" else "object"
            return reason(kind, body, right if isinstance(tree.ops[0], ast.Is) else f"not {right}", now(left))
        return reason("constant", body, body, _pair(left, now(left)))
    if body.startswith(("not ", "___", "hasattr", "isinstance", "len(")) or isinstance(tree, ast.Call):
        return reason("structure" if "len" in body or "keys" in body else "object")
    return reason("flag" if isinstance(tree, (ast.Name, ast.Attribute, ast.Subscript)) else "other")


def _kind_of(name: str, value: str) -> str:
    """What sort of Python value was compared: a number that was passed, one that an object keeps, a flag, ..."""
    if name.startswith(("len(", "list(dict.keys(", "tuple.__iter__")):
        return "structure"
    if name.endswith(".training"):
        return "train_mode"
    if name.startswith("___stack"):
        return "item"  # Dynamo's name for what is on the stack where it goes on after a graph break
    if _GLOBAL.match(name):
        return "global"
    if not re.fullmatch(r"[-+]?[\d.].*|[-+]?(inf|nan)", value):
        return "flag"
    return "attribute" if re.fullmatch(r"\w+(\.\w+|\._modules\['\w+'\])+", name) else "constant"


def _class_name(text: str) -> str:
    """ "<class 'torch.Tensor'>" and "a tensor type" alike: "Tensor"."""
    if text.strip().startswith("a tensor type"):
        return "Tensor"
    return text.strip().removeprefix("<class '").removesuffix("'>").rpartition(".")[2]


def changed(guard: str | None, expected: str | None, actual: str | None) -> str | None:
    """What changed, in a few words: "x: size[1]: 64 -> 96", "global FLAG: True -> False"; None: not known."""
    if expected is None and actual is None:
        return None
    name = guard or ""
    if expected and name != expected and name.endswith(expected):
        name = re.sub(r" (==|!=|is) *$", "", name.removesuffix(expected))
    if name.startswith("G["):
        name = _GLOBAL.sub(r"global \1", name)
    shown = f"{name}: " if name and name != expected else ""
    return f"{shown}{expected or '?'} -> {actual or '?'}"


def _pair(name: str, value: str | None) -> str | None:
    return None if value is None else f"{name} = {value}"


def _source(text: str, head: str) -> str | None:
    if match := _STACK.search(text):
        return f"{match['file']}:{match['line']}"
    match = _SOURCE.search(head.strip())
    return match["source"].strip() if match else None


# --- values of the compiled frame, without running any code of its owner --------------------------------------------
def frame_value(names: Mapping[str, Any]) -> Callable[[str], str | None]:
    """A function from an expression over a frame's locals to its present value, as text of at most 80 characters.

    Only names, attributes kept in an object's own dictionary, items of plain containers, ``len``, ``type`` and sizes
    of tensors are looked up: no property, descriptor or ``__getattr__`` runs, and nothing ever raises.
    """

    def value(expression: str) -> str | None:
        try:
            result = _evaluate(ast.parse(expression, mode="eval").body, names)
            plain = isinstance(result, (bool, int, float, str, bytes, type(None), list, tuple))
            return (repr(result) if plain else getattr(result, "__qualname__", type(result).__qualname__))[:80]
        except Exception:  # an expression this small language does not have: the value stays unknown
            return None

    return value


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return vars(_evaluate(node.value, names))[node.attr]
    if isinstance(node, ast.Subscript):
        base, key = _evaluate(node.value, names), _evaluate(node.slice, names)
        if type(base) in (list, tuple, dict):
            return base[key]
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and len(node.args) == 1 and node.func.id in ("len", "type"):
            argument = _evaluate(node.args[0], names)
            if node.func.id == "type":
                return type(argument)
            if type(argument) in (list, tuple, dict, set, str):
                return len(argument)
        if isinstance(node.func, ast.Attribute) and not node.args and node.func.attr in ("size", "stride"):
            tensor = _evaluate(node.func.value, names)
            if type(tensor).__module__.split(".")[0] == "torch":
                return tuple(int(n) for n in (tensor.shape if node.func.attr == "size" else tensor.stride()))
    raise LookupError(ast.dump(node))
