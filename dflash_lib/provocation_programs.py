"""The programs that show each hazard: what one thread does, what another one suffers from it.

Each takes a number of seconds and returns (how often the fault was seen, how often it could have been, one line).
Unpatched they stop at the first faults; patched they go on for all their time.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dflash_lib.lanes import own_entry_point, run_in_thread

Result = tuple[int, int, str]
ENOUGH = 20


class NotApplicable(Exception):
    """The program needs something that is not here (a GPU, a library)."""


_PROGRAMS: dict[str, Callable[[float], Result]] = {}


def program(name: str) -> Callable[[float], Result]:
    """The program of that hazard."""
    from dflash_lib import provocation_programs_state  # noqa: F401  (adds its own)

    return _PROGRAMS[name]


def shows(name: str) -> Callable[[Callable[[float], Result]], Callable[[float], Result]]:
    """Registers the decorated function as the program of a hazard."""

    def add(function: Callable[[float], Result]) -> Callable[[float], Result]:
        _PROGRAMS[name] = function
        return function

    return add


class Faults:
    """Counts what victims see."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.until = 0.0
        self.failures = self.attempts = 0
        self.first = ""

    def goes_on(self) -> bool:
        """Whether there is time left; the time begins with the first question."""
        self.until = self.until or time.monotonic() + self.seconds
        return time.monotonic() < self.until and self.failures < ENOUGH

    def look(self, fault: str | None) -> None:
        """One more attempt; ``fault`` says what was seen, None that all was well."""
        self.attempts += 1
        if fault:
            self.failures += 1
            self.first = self.first or fault

    def result(self, what: str) -> Result:
        return (
            self.failures,
            self.attempts,
            f"{self.failures} of {self.attempts} {what}" + (f", first: {self.first}" if self.first else ""),
        )


def fault_of(work: Callable[[], Any]) -> str | None:
    """What ``work`` raises, in one line; None if it returns."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


@contextlib.contextmanager
def disturbance(work: Callable[[], Any]) -> Iterator[None]:
    """Another thread that does ``work`` again and again; what it raises is dropped (it suffers, too)."""
    stop, warm = threading.Event(), threading.Event()

    def again() -> None:
        while not stop.is_set():
            with contextlib.suppress(Exception):
                work()
            warm.set()

    thread = run_in_thread(again, name="disturber")
    warm.wait(60)  # the first time imports half of torch
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


class Held:
    """Another thread that is stopped in the middle of something: ``with Held(work):``; work calls ``pause()``."""

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        self._reached, self._go = threading.Event(), threading.Event()
        self._thread = run_in_thread(self._run, work, name="holder")

    def _run(self, work: Callable[[Callable[[], None]], Any]) -> None:
        try:
            work(self._pause)
        finally:
            self._reached.set()

    def _pause(self) -> None:
        self._reached.set()
        self._go.wait(30)

    def __enter__(self) -> None:
        self._reached.wait(60)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(60)


def compile_while(pause: Callable[[], None]) -> None:
    """Compiles something, and calls ``pause`` in the middle."""

    def backend(graph: Any, inputs: Any) -> Any:
        pause()
        return graph

    torch.compile(fresh(_doubled), backend=backend)(torch.ones(3))


def export_while(pause: Callable[[], None]) -> None:
    """Exports something, and calls ``pause`` in the middle."""

    class Paused(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pause()
            return x + 1

    torch.export.export(Paused(), (torch.ones(3),), strict=False)


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that nothing has compiled yet."""
    return own_entry_point(function, f"fresh{random.Random().getrandbits(60)}")


def compile_something() -> None:
    """One compile with AOTAutograd, forward and backward, of code never seen before."""
    x = torch.ones(3, requires_grad=True)
    torch.compile(fresh(_doubled), backend="aot_eager")(x).sum().backward()


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin()


def _slow(x: Any) -> Any:
    time.sleep(0.002)
    return x + 1


class _SlowModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def forward(self, x: Any) -> Any:
        time.sleep(0.002)
        return self.inner(x)


@shows("tracing-flag")
def tracing_flag(seconds: float) -> Result:
    compiled = torch.compile(fresh(_doubled), backend="eager")
    x = torch.ones(3)
    compiled(x)
    faults = Faults(seconds)
    with disturbance(lambda: torch.fx.symbolic_trace(_slow)):
        while faults.goes_on():
            faults.look(fault_of(lambda: compiled(x)))
    return faults.result("compiled calls raised beside symbolic_trace")


class _InliningTracer(torch.fx.Tracer):
    """A tracer that handles module calls itself, as several libraries' do."""

    def call_module(self, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


@shows("module-calls")
def module_calls(seconds: float) -> Result:
    untouched = torch.nn.Module.__call__, torch.nn.Module.__getattr__
    module, x = _SlowModule(), torch.ones(2, 4)
    wanted = module(x)
    inlined = [str(node.target) for node in _InliningTracer().trace(_SlowModule()).nodes]
    faults = Faults(seconds)

    def right() -> None:
        assert torch.equal(module(x), wanted), "another value"

    def trace() -> None:
        torch.fx.symbolic_trace(_SlowModule())

    def traced_inline() -> None:
        graph = _InliningTracer().trace(_SlowModule())
        assert [str(node.target) for node in graph.nodes] == inlined, "another graph"

    with disturbance(trace), disturbance(compile_something):
        while faults.goes_on():
            faults.look(fault_of(right))
            faults.look(fault_of(traced_inline))
    if (torch.nn.Module.__call__, torch.nn.Module.__getattr__) != untouched:
        faults.look("nn.Module is patched for good")
    return faults.result("module calls and traces were wrong beside other traces and compiles")


@shows("compilation-environment")
def compilation_environment(seconds: float) -> Result:
    from torch._higher_order_ops.utils import _set_compilation_env

    def set_environment(pause: Callable[[], None]) -> None:
        with _set_compilation_env():
            pause()

    def trace(pause: Callable[[], None]) -> None:
        def traced(x: Any) -> Any:
            pause()
            return x + 1

        torch.fx.symbolic_trace(traced)

    compiled = torch.compile(fresh(_doubled), backend="eager")
    compiled(torch.ones(3))
    tracing = Held(trace)
    tracing.__enter__()
    environment = Held(set_environment)
    environment.__enter__()
    tracing.__exit__()
    environment.__exit__()
    faults = Faults(seconds)
    faults.look(fault_of(lambda: compiled(torch.ones(3))))
    return faults.result("compiled calls raised after a trace and an operator's environment overlapped")


@shows("trace-context")
def trace_context(seconds: float) -> Result:
    import torch.fx.traceback as traceback
    from torch.fx.experimental.proxy_tensor import make_fx

    def annotate(pause: Callable[[], None]) -> None:
        with traceback.preserve_node_meta(), contextlib.ExitStack() as stack:
            if hasattr(traceback, "annotate"):
                stack.enter_context(traceback.annotate({"whose": "the other thread's"}))
            traceback.set_stack_trace(["the other thread's"])
            pause()

    faults = Faults(seconds)
    with Held(annotate):
        graph = make_fx(_doubled)(torch.ones(3)).graph
        for node in graph.nodes:
            noted = str(node.meta.get("custom", "")) + str(node.meta.get("stack_trace", ""))
            faults.look(noted if "the other thread's" in noted else None)
    return faults.result("nodes carry what another thread noted")


@shows("skipped-graph-modules")
def skipped_graph_modules(seconds: float) -> Result:
    import torch.fx.graph_module as graph_module

    usual = graph_module._forward_from_src
    faults = Faults(seconds)
    with Held(compile_while):
        same = graph_module._forward_from_src is usual
    faults.look(None if same else "it is Dynamo's function, which marks code to be skipped")
    return faults.result("looks at what builds a GraphModule's forward saw another thread's")


@shows("device-guard")
def device_guard(seconds: float) -> Result:
    faults = Faults(seconds)
    for _ in range(4):  # in threads that end, one after another; the fault ends the process
        run_in_thread(lambda: faults.look(fault_of(compile_something))).join()
    return faults.result("compiles in a new thread raised")


@shows("graph-break-mode")
def graph_break_mode(seconds: float) -> Result:
    if not hasattr(torch._dynamo, "error_on_graph_break"):
        raise NotApplicable("this torch has no error_on_graph_break")

    def strict(pause: Callable[[], None]) -> None:
        with torch._dynamo.error_on_graph_break(True):
            pause()

    def breaks(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    faults = Faults(seconds)
    with Held(strict):
        faults.look(fault_of(lambda: torch.compile(breaks, backend="eager")(torch.ones(3))))
    return faults.result("compiles raised because another thread forbids graph breaks")


@shows("cudagraph-override")
def cudagraph_override(seconds: float) -> Result:
    from torch._dynamo import decorators, utils

    current = getattr(utils, "_get_cudagraph_override", lambda: None)  # what a compile starts with

    def override(pause: Callable[[], None]) -> None:
        with getattr(decorators, "override_cudagraphs", contextlib.nullcontext)(False):
            pause()

    faults = Faults(seconds)
    with Held(override):
        faults.look(None if current() is None else "compiles here would take another thread's choice")
    return faults.result("looks at the override saw another thread's")


@shows("compiling-flags")
def compiling_flags(seconds: float) -> Result:
    faults = Faults(seconds)
    while faults.goes_on():
        for work in (compile_while, export_while):
            with Held(work):
                faults.look("is_compiling() is True in eager code" if torch.compiler.is_compiling() else None)
                faults.look("is_exporting() is True in eager code" if torch.compiler.is_exporting() else None)
    return faults.result("looks at the flags saw another thread's")


@shows("hidden-states")
def hidden_states(seconds: float) -> Result:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise NotApplicable("transformers is not installed") from None
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    rows = [torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7, 8]])]

    def states(row: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(model(row, output_hidden_states=True).hidden_states)

    wanted = [states(row) for row in rows]
    faults = Faults(seconds)

    def check(which: int) -> None:
        while faults.goes_on():
            found = states(rows[which])
            same = len(found) == len(wanted[which]) and all(map(torch.equal, found, wanted[which]))
            faults.look(None if same else "hidden states of another forward")

    layer = torch.nn.Linear(3, 3)
    with disturbance(compile_something), disturbance(lambda: torch.export.export(layer, (torch.ones(2, 3),))):
        threads = [run_in_thread(check, which) for which in range(2)]
        for thread in threads:
            thread.join()
    return faults.result("forwards returned wrong hidden states")


def same_named(function: Any) -> types.FunctionType:
    """A copy with a code object of its own and the same name."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
