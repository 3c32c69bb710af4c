"""The race's workloads: small programs in which several threads compile, trace or merely run at the same time.

A workload has *lanes* (threads that do steps) and *tracers* (threads that trace without end while the lanes run). The
lanes' work is that of a drafter in small: a compiled attention whose row length changes, an eager module around it,
a backward, default AdamW. On CUDA the attention is ``flex_attention``; on a CPU, where that has no backward (an error
from torch 2.11 on), it is ``scaled_dot_product_attention`` with the same causal rule as a dense mask.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash_lib.race_strategies import Strategy

WIDTH, HEADS = 32, 2


@dataclass
class Context:
    """What a workload is told: how it is protected, where it runs, how it compiles."""

    strategy: Strategy
    device: str = "cpu"
    threads: int = 3
    backend: str = "aot_eager"
    repeat: int = 2  # steps done at a length before it changes
    same_lengths: bool = False  # all lanes take the same lengths in the same order
    shift: int = 0  # how many lengths later the lengths begin
    kernels: bool = False  # the compiled function has pointwise work too, for which Inductor writes kernels of its own
    compiles: Counter[str] = field(default_factory=Counter)  # forward graphs handed to the backend, by thread name

    def compile(self, function: Callable[..., Any], lane: str) -> Callable[..., Any]:
        """``torch.compile`` of the lane's own copy of a function (own code object, own name), counting its compiles."""
        code = function.__code__.replace(co_name=f"{function.__name__}_{lane.replace('-', '_')}")
        own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
        return torch.compile(own, backend=self._counting, dynamic=False)

    def _counting(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        self.compiles[threading.current_thread().name] += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs, **options)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention over [R, heads, S, d] with a dense mask: what a CPU compiles."""
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_with_kernels(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """:func:`sdpa` between two pointwise parts, which a backend has to write code for."""
    return torch.tanh(sdpa(nn.functional.normalize(q, dim=-1), k, v, mask)) * torch.sigmoid(v)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention over [R, heads, S, d] with a BlockMask: what a GPU compiles."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """The visibility rule of both forms."""
    return q >= kv


class Block(nn.Module):
    """An attention block: eager projections around one compiled attention."""

    def __init__(self, attention: Callable[..., Tensor], seed: int) -> None:
        super().__init__()
        self.attention = attention
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) * WIDTH**-0.5

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.into(x).chunk(3, dim=-1))
        return x + self.out(self.attention(q, k, v, mask).transpose(1, 2).flatten(-2))


class Workload:
    """Lanes that do steps, and tracers that trace meanwhile."""

    name = ""
    question = ""
    tracers = 0
    steps_factor = 1  # a step here is so much shorter that there are this many times more of them
    compares_with_alone = False

    def __init__(self, context: Context) -> None:
        self.context = context

    def lane(self, lane: str, index: int) -> Callable[[int], float | None]:
        """Builds a lane, in the lane's own thread; returns its step function (step -> loss or None)."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """One step of the model in the calling thread: what a coordinator runs before its workers start."""
        self.lane("main", 0)(0)

    def trace(self) -> None:
        """One trace, in a tracer's thread."""


class CompileStorm(Workload):
    """Every lane trains, and every new row length recompiles its attention."""

    name = "compile_storm"
    question = "threads train while row lengths change, so that compiles never end"
    compares_with_alone = True
    # On a GPU that threads share, a lazily compiled backward can deadlock: that is shared_gpu_backward's question.
    # Here every backward runs in the thread that asked for it, so that this workload shows the tracing race alone.
    backward_in_caller = True

    def length(self, index: int, step: int) -> int:
        """The row length of a lane's step: another one every ``repeat`` steps, never used before by this lane."""
        first, stride = (128, 16) if self.context.device != "cpu" else (8, 1)
        number = self.context.shift + step // self.context.repeat + (0 if self.context.same_lengths else index)
        return first + stride * number

    def mask(self, length: int) -> Any:
        if self.context.device == "cpu":
            return torch.ones(length, length, dtype=torch.bool).tril()
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(causal, None, None, length, length, device=self.context.device)

    def lane(self, lane: str, index: int) -> Callable[[int], float]:
        context, device = self.context, self.context.device
        on_cpu = sdpa_with_kernels if context.kernels else sdpa
        compiled = context.compile(on_cpu if device == "cpu" else flex, lane)

        def attention(*args: Any) -> Tensor:
            with context.strategy.call(lane):
                return compiled(*args)

        model = Block(attention, seed=index).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1000 + index)

        def step(number: int) -> float:
            length = self.length(index, number)
            x = torch.randn(2, length, WIDTH, generator=generator).to(device)
            loss = (model(x, self.mask(length)) - x.roll(1, 1)).square().mean()
            optimizer.zero_grad(set_to_none=True)
            if self.backward_in_caller:
                with torch.autograd.set_multithreading_enabled(False):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            return loss.item()

        return step


class _Bystanders(Workload):
    """Lanes that only call what is already built, eager and compiled, while other threads trace."""

    tracers = 2
    steps_factor = 20

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.traced_module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
        self.traced_example = torch.ones(2, 4)
        self.expected_nodes = len(self.graph().nodes)

    def graph(self) -> torch.fx.Graph:
        """One trace, as anybody would write it."""
        raise NotImplementedError

    def trace(self) -> None:
        found = len(self.graph().nodes)
        if found != self.expected_nodes:
            raise AssertionError(f"the traced graph has {found} nodes, alone it has {self.expected_nodes}")

    def lane(self, lane: str, index: int) -> Callable[[int], None]:
        context, device = self.context, self.context.device
        compiled = context.compile(_scaled_tanh, lane)
        linear = nn.Linear(8, 8)
        eager = nn.Sequential(linear, nn.Tanh()).requires_grad_(False).to(device)
        x = torch.linspace(-1, 1, 16, device=device).view(2, 8)
        expected_eager = torch.tanh(nn.functional.linear(x, linear.weight, linear.bias))
        expected_compiled = None

        def step(number: int) -> None:
            nonlocal expected_compiled
            if not torch.equal(eager(x), expected_eager):
                raise AssertionError("an eager module gave another result")
            with context.strategy.call(lane):
                found = compiled(x)
            expected_compiled = found if expected_compiled is None else expected_compiled
            if not torch.equal(found, expected_compiled):
                raise AssertionError("a compiled function gave another result")

        return step


def _scaled_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x * 3) + 1


class MakeFx(_Bystanders):
    name = "make_fx"
    question = "two threads run make_fx while the others call modules and compiled functions"

    def graph(self) -> torch.fx.Graph:
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(lambda x: self.traced_module(x).sum())(self.traced_example).graph


class SymbolicTrace(_Bystanders):
    name = "symbolic_trace"
    question = "two threads run torch.fx.symbolic_trace while the others call modules and compiled functions"

    def graph(self) -> torch.fx.Graph:
        return torch.fx.symbolic_trace(self.traced_module).graph


class UnpickleGraphModule(_Bystanders):
    """Unpickling a GraphModule traces it again: loading a model in one thread is enough to hurt the others.

    The bytes are made here, from this program's own module; nothing is ever unpickled from a file.
    """

    name = "unpickle_graph_module"
    question = "two threads unpickle a GraphModule while the others call modules and compiled functions"

    def __init__(self, context: Context) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.pickled = pickle.dumps(torch.fx.symbolic_trace(module))
        super().__init__(context)

    def graph(self) -> torch.fx.Graph:
        return pickle.loads(self.pickled).graph


class SharedGpuBackward(CompileStorm):
    """Lanes on ONE GPU, whose backwards are compiled lazily: in the device's autograd thread, which they share."""

    name = "shared_gpu_backward"
    question = "threads that share a GPU compile their backwards lazily, in the device's one autograd thread"
    compares_with_alone = False
    backward_in_caller = False


class DeviceThread:
    """Stands for the autograd engine's thread of a GPU: every backward of every Python thread runs in this one.

    Like the engine, it is left out when the caller has switched autograd's multithreading off.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], queue.SimpleQueue[BaseException | None]]]
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="device-autograd", daemon=True).start()

    def _serve(self) -> None:
        while True:
            job, answer = self._jobs.get()
            try:
                job()
                answer.put(None)
            except BaseException as error:
                answer.put(error)

    def run(self, job: Callable[[], None]) -> None:
        """Runs a job in the device's thread and waits for it."""
        if not torch._C._is_multithreading_enabled():
            return job()
        answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._jobs.put((job, answer))
        if (error := answer.get()) is not None:
            raise error


class SharedGpuBackwardTwin(Workload):
    """The same deadlock without a GPU: torch's real compile lock, its real lazy backward, an imitated device thread.

    Dynamo holds ``compile_lock`` and, as tracing ``flex_attention`` on CUDA does, needs the device's thread for an
    ``autograd.grad`` on fake tensors. A backward occupies that thread and, as Inductor's does, takes ``compile_lock``
    for its first compile. The backend below does exactly these two things and nothing else.
    """

    name = SharedGpuBackward.name
    question = SharedGpuBackward.question + " (CPU twin: that thread is imitated)"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.device_thread = DeviceThread()

    def lane(self, lane: str, index: int) -> Callable[[int], float]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.convert_frame import compile_lock
        from torch._functorch.aot_autograd import make_boxed_func

        context = self.context

        def compile_backward(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            time.sleep(0.005)
            with compile_lock:  # as torch/_inductor/compile_fx.py::compile_fx_backward
                return make_boxed_func(graph.forward)

        aot = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=compile_backward)

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            context.compiles[lane] += 1
            time.sleep(0.005)  # tracing takes its time, with compile_lock held
            self.device_thread.run(lambda: None)  # ... and asks the device's thread for autograd.grad
            return aot(graph, inputs)

        code = _scaled_tanh.__code__.replace(co_name=f"twin_{lane.replace('-', '_')}")
        own = types.FunctionType(code, _scaled_tanh.__globals__)
        compiled = torch.compile(own, backend=backend, dynamic=False)

        def step(number: int) -> float:
            x = torch.linspace(-1, 1, 4 + number // context.repeat, requires_grad=True)
            with context.strategy.call(lane):
                loss = compiled(x).sum()
            self.device_thread.run(loss.backward)
            return loss.item()

        return step


CLASSES: dict[str, type[Workload]] = {
    workload.name: workload
    for workload in (CompileStorm, MakeFx, SymbolicTrace, UnpickleGraphModule, SharedGpuBackward)
}


def build(name: str, context: Context) -> Workload:
    """The workload of a name; on a CPU the shared GPU's is its twin."""
    if name == SharedGpuBackward.name and context.device == "cpu":
        return SharedGpuBackwardTwin(context)
    return CLASSES[name](context)
