"""More programs that show hazards: settings, limits, generators, defaults, and what needs a GPU."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from dflash_lib.lanes import run_in_thread
from dflash_lib.provocation_programs import (
    Faults,
    Held,
    NotApplicable,
    Result,
    compile_something,
    compile_while,
    fault_of,
    fresh,
    same_named,
    shows,
)


@shows("inherited-settings")
def inherited_settings(seconds: float) -> Result:
    import torch._dynamo.config as settings

    faults = Faults(seconds)
    before = settings.recompile_limit
    settings.recompile_limit = 77
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(settings.recompile_limit))
    thread.start()
    thread.join()
    settings.recompile_limit = before
    faults.look(None if seen == [77] else f"the starting thread set 77, the new thread reads {seen[0]}")
    return faults.result("settings did not reach a new thread")


@shows("dynamic-settings")
def dynamic_settings(seconds: float) -> Result:
    import torch._dynamo.config as settings

    before = settings.assume_static_by_default, settings.automatic_dynamic_shapes

    def call(dynamic: bool) -> Held:
        def work(pause: Callable[[], None]) -> None:
            stop = torch._dynamo.disable(pause)

            def function(x: torch.Tensor) -> torch.Tensor:
                stop()
                return x + 1

            torch.compile(function, backend="eager", dynamic=dynamic)(torch.ones(4))

        return Held(work)

    first = call(True)
    first.__enter__()
    second = call(False)
    second.__enter__()
    first.__exit__()
    second.__exit__()
    after = settings.assume_static_by_default, settings.automatic_dynamic_shapes
    faults = Faults(seconds)
    faults.look(None if after == before else f"settings are {after} afterwards, were {before}")
    return faults.result("pairs of overlapping calls left settings changed")


def _times(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).cos()


@shows("recompile-limit")
def recompile_limit(seconds: float) -> Result:
    compiled = torch.compile(fresh(_times), backend="eager", dynamic=False, fullgraph=True)
    faults = Faults(seconds)

    def lane(number: int) -> None:
        for length in range(2, 7):
            faults.look(fault_of(lambda: compiled(torch.ones(10 * number + length))))  # noqa: B023

    threads = [run_in_thread(lane, number) for number in range(1, 5)]
    for thread in threads:
        thread.join()
    return faults.result("calls of 4 threads with 5 lengths each hit the limit of 8")


@shows("automatic-dynamic")
def automatic_dynamic(seconds: float) -> Result:
    dynamic: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        dynamic.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph

    def lane(*lengths: int) -> None:
        compiled = torch.compile(same_named(function), backend=backend)
        for length in lengths:
            compiled(torch.ones(length))

    function: Any = fresh(_times)
    run_in_thread(lane, 16, 32).join()
    dynamic.clear()
    run_in_thread(lane, 64).join()
    faults = Faults(seconds)
    faults.look("dynamic because of lengths that only another thread has seen" if any(dynamic) else None)
    return faults.result("first compiles of a thread were not static")


@shows("dispatch-modes")
def dispatch_modes(seconds: float) -> Result:
    from torch.utils._python_dispatch import TorchDispatchMode

    class PassesOn(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def in_mode(pause: Callable[[], None]) -> None:
        with PassesOn():
            pause()

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph

    compiles: list[Any] = []
    compiled = torch.compile(fresh(_times), backend=backend)
    with Held(in_mode):
        compiled(torch.ones(3))
    compiled(torch.ones(3))
    faults = Faults(seconds)
    faults.look(None if compiles else "skipped, then and afterwards")
    return faults.result("functions were never compiled because another thread was in a dispatch mode")


@shows("generators")
def generators(seconds: float) -> Result:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    draws: dict[str, Callable[[], Any]] = {"torch.rand": lambda: torch.rand(2).tolist(), "random": random.random}
    if torch.cuda.is_available():
        draws["torch.rand on the GPU"] = lambda: torch.rand(2, device="cuda").tolist()

    def compile_slowly(pause: Callable[[], None]) -> None:
        def compiler(graph: Any, inputs: Any) -> Any:
            pause()
            return make_boxed_func(graph.forward)

        torch.compile(fresh(_times), backend=aot_autograd(fw_compiler=compiler))(torch.ones(3))

    def drawn() -> list[tuple[str, str]]:
        return [(name, str(draw())) for name, draw in draws.items() for _ in range(5)]

    faults = Faults(seconds)
    while faults.goes_on():
        with Held(compile_slowly):
            meanwhile = set(drawn())
        for name, value in drawn():
            faults.look(f"{name} gave the same number twice" if (name, value) in meanwhile else None)
    return faults.result("draws after a compile repeat what was drawn meanwhile")


@shows("defaults")
def defaults(seconds: float) -> Result:
    with Held(compile_while):
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("high")
    faults = Faults(seconds)
    found = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    faults.look(None if found[0] is torch.float64 else "the default dtype went back")
    faults.look(None if found[1] else "deterministic mode went back")
    if torch.cuda.is_available():
        precision = torch.backends.cuda.matmul.allow_tf32
        faults.look(None if precision else "float32 precision went back")
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    return faults.result("defaults set beside a compile were undone")


@shows("metrics-context")
def metrics_context(seconds: float) -> Result:
    faults = Faults(seconds)

    def lane() -> None:
        while faults.goes_on():
            faults.look(fault_of(compile_something))

    threads = [run_in_thread(lane) for _ in range(3)]
    for thread in threads:
        thread.join()
    return faults.result("compiles in three threads raised")


@shows("cudagraph-trees")
def cudagraph_trees(seconds: float) -> Result:
    from torch._inductor import cudagraph_trees as trees

    faults = Faults(seconds)

    def use() -> None:
        fault = fault_of(lambda: trees.get_obj(trees.local, "tree_manager_containers"))
        explained = fault is not None and "compile with the default mode" in fault
        faults.look(None if explained else fault)

    run_in_thread(use).join()
    return faults.result("uses in a new thread stopped without an explanation")


def _attended(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ weight, -1).sin() @ weight.t()


def _train_on_one_gpu(faults: Faults, lane: int) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    weight = torch.randn(32, 32, device=device, requires_grad=True)
    compiled = torch.compile(fresh(_attended), backend="aot_eager", dynamic=False)
    length = 1
    while faults.goes_on():
        length += 1
        if length % 6 == 0:
            compiled = torch.compile(fresh(_attended), backend="aot_eager", dynamic=False)

        def step() -> None:
            compiled(torch.randn(16 * length + lane, 32, device=device), weight).sum().backward()  # noqa: B023

        faults.look(fault_of(step))


def _on_one_gpu(seconds: float, threads: int) -> Faults:
    if not torch.cuda.is_available():
        raise NotApplicable("needs a CUDA device")
    faults = Faults(seconds)
    lanes = [run_in_thread(_train_on_one_gpu, faults, lane) for lane in range(threads)]
    for lane in lanes:
        lane.join()
    return faults


@shows("backward-deadlock")
def backward_deadlock(seconds: float) -> Result:
    return _on_one_gpu(max(seconds, 20.0), 3).result("steps of three threads on one GPU raised (a hang shows as hung)")


@shows("backward-context")
def backward_context(seconds: float) -> Result:
    if not torch.cuda.is_available():
        raise NotApplicable("needs a CUDA device")
    faults = Faults(seconds)

    class Nested(torch.autograd.Function):
        """Runs a backward of its own inside backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            with torch.enable_grad():
                inner = torch.ones(2, device=gradient.device, requires_grad=True)
                (inner * 2).sum().backward()
            return gradient * 2

    def lane() -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        while faults.goes_on():
            faults.look(fault_of(lambda: Nested.apply(x).sum().backward()))

    threads = [run_in_thread(lane) for _ in range(3)]
    for thread in threads:
        thread.join()
    return faults.result("backward calls with a backward inside raised")
