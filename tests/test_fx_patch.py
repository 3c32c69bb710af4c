"""Isolation in this process: what it changes, that it leaves nothing behind, and that what it must keep still works."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.cudagraph_trees
import torch.fx._symbolic_trace as symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from dflash_lib import fx_patch, hazards
from dflash_lib.per_thread import PerThreadGlobals
from dflash_lib.provocation_programs import Held, fresh

TOUCHED = (
    "random",
    "threading",
    "torch._dynamo.cache_size",
    "torch._dynamo.convert_frame",
    "torch._dynamo.pgo",
    "torch._dynamo.utils",
    "torch._functorch.aot_autograd",
    "torch._higher_order_ops.utils",
    "torch._inductor.cudagraph_trees",
    "torch._library.fake_impl",
    "torch.autograd.graph",
    "torch.compiler",
    "torch.fx._lazy_graph_module",
    "torch.fx._symbolic_trace",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.graph_module",
    "torch.fx.traceback",
    "torch.nn.modules.module",
    "torch.utils._config_module",
    "torch.utils._python_dispatch",
)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Other test modules run isolated, these decide for themselves."""
    before = fx_patch.status().installed
    yield
    (fx_patch.install if before else fx_patch.uninstall)()


def everything() -> dict[tuple[str, ...], int]:
    """The identity of every object in the modules that isolation touches, and of every function's code."""
    found: dict[tuple[str, ...], int] = {}

    def note(value: Any, *place: str) -> None:
        found[place] = id(value)
        if isinstance(value, types.FunctionType):
            found[*place, "__code__"] = id(value.__code__)
        if "__wrapped__" in getattr(value, "__dict__", {}):
            note(value.__wrapped__, *place, "__wrapped__")

    for name in TOUCHED:
        module = sys.modules[name]
        note(type(module), name, "__class__")
        for key, value in vars(module).items():
            note(value, name, key)
            if isinstance(value, type) and value.__module__ == name:
                for inner, attribute in vars(value).items():
                    note(attribute, name, key, inner)
    return found


def doubled(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin()


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(i)`` gives in ``count`` threads that begin together; the first error is raised."""
    results: list[Any] = [None] * count
    together = threading.Barrier(count)

    def run(number: int) -> None:
        together.wait(30)
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Net(torch.nn.Module):
    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.pause = pause

    def forward(self, x: Any) -> Any:
        self.pause()
        return self.layers(x) * self.scale


def trace_until_told(pause: Callable[[], None]) -> None:
    torch.fx.symbolic_trace(Net(pause))


# --- installing and taking off --------------------------------------------------------------------------------------
def test_uninstall_leaves_every_object_and_every_code_as_before() -> None:
    fx_patch.uninstall()
    torch.compile(doubled, backend="aot_eager")(torch.ones(2))  # something was compiled before
    before = everything()
    fx_patch.install()
    fx_patch.install()
    changed = {place for place, value in everything().items() if before.get(place) != value}
    fx_patch.uninstall()
    fx_patch.uninstall()
    assert everything() == before
    assert len(changed) > 40, "isolation has touched torch in between"
    assert not {place for place in changed if place[-1] in ("is_compiling", "is_exporting", "is_fx_symbolic_tracing")}


def test_functions_keep_their_identity_while_isolated() -> None:
    fx_patch.uninstall()
    known = [torch.compiler.is_compiling, symbolic_trace.is_fx_symbolic_tracing, torch.nn.Module.__call__]
    with fx_patch.isolated():
        now = [torch.compiler.is_compiling, symbolic_trace.is_fx_symbolic_tracing, torch.nn.Module.__call__]
        assert all(a is b for a, b in zip(known, now, strict=True))


def test_install_from_many_threads_at_once() -> None:
    fx_patch.uninstall()
    before = everything()
    in_threads(8, lambda number: fx_patch.install())
    assert fx_patch.status().installed
    in_threads(8, lambda number: fx_patch.uninstall())
    assert everything() == before


def test_status_and_report_say_what_is_isolated() -> None:
    fx_patch.uninstall()
    assert not fx_patch.status().installed
    assert "NOT isolated" in fx_patch.report()
    with fx_patch.isolated():
        now = fx_patch.status()
        assert now.installed and set(now.hazards.values()) <= {"isolated", "absent"}
        assert list(now.hazards) == [hazard.name for hazard in hazards.ALL]
        assert all(f"{name} " in fx_patch.report() for name in now.hazards)
        with fx_patch.isolated():
            pass
        assert fx_patch.status().installed, "the inner block has not taken off what the outer one put on"
    assert not fx_patch.status().installed


def test_installing_inside_a_trace_is_refused() -> None:
    fx_patch.uninstall()

    def traced(x: Any) -> Any:
        fx_patch.install()
        return x

    with pytest.raises(RuntimeError, match="called inside a trace"):
        torch.fx.symbolic_trace(traced)
    assert not fx_patch.status().installed


def test_installing_waits_for_the_trace_of_another_thread() -> None:
    fx_patch.uninstall()
    installed = threading.Thread(target=fx_patch.install)
    with Held(trace_until_told):
        installed.start()
        installed.join(0.3)
        assert installed.is_alive()
    installed.join(30)
    assert fx_patch.status().installed


def test_install_heals_what_overlapping_traces_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fx_patch.uninstall()
    original = torch.nn.Module.__call__
    left = types.FunctionType((lambda *a: None).__code__, vars(symbolic_trace))
    torch.nn.Module.__call__ = left  # type: ignore[method-assign]
    if "_is_fx_tracing_flag" in vars(symbolic_trace):
        symbolic_trace._is_fx_tracing_flag = True
    fx_patch.install()
    assert torch.nn.Module.__call__ is original
    assert not symbolic_trace.is_fx_tracing()


# --- unknown internals ----------------------------------------------------------------------------------------------
def test_unknown_internals_are_named_with_the_release_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    fx_patch.uninstall()
    monkeypatch.delattr(symbolic_trace, "_autowrap_check")
    before = everything()
    with pytest.raises(fx_patch.UnknownInternals) as caught:
        fx_patch.install()
    assert "torch.fx._symbolic_trace._autowrap_check is missing" in str(caught.value)
    assert torch.__version__ in str(caught.value)
    assert everything() == before
    assert not any(hazard.patched for hazard in hazards.ALL)


def test_a_missing_variable_is_never_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fx_patch.UnknownInternals, match=r"torch\.compiler\._no_such_flag is missing"):
        PerThreadGlobals("torch.compiler", {"_no_such_flag": False}).install()
    monkeypatch.setattr(torch.compiler, "_unused_flag", False, raising=False)
    with pytest.raises(fx_patch.UnknownInternals, match="_unused_flag is used by no function"):
        PerThreadGlobals("torch.compiler", {"_unused_flag": False}).install()


# --- what must go on working ----------------------------------------------------------------------------------------
def test_is_compiling_folds_inside_compiled_code_and_is_false_outside() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x - 1

    with fx_patch.isolated():
        compiled = torch.compile(branch, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1)).item() == 1
        assert branch(torch.zeros(1)).item() == -1


def test_code_that_dynamo_inlines_from_patched_modules_compiles_as_it_does_without() -> None:
    import torch.fx.traceback as traceback

    def asks_the_tracer(x: torch.Tensor) -> torch.Tensor:
        return x - 1 if symbolic_trace.is_fx_tracing() else x + 1

    def asks_the_notes(x: torch.Tensor) -> torch.Tensor:
        return x - 1 if traceback.has_preserved_node_meta() else x + 1

    def whole(function: Callable[[torch.Tensor], torch.Tensor]) -> float | type[Exception]:
        try:
            return torch.compile(fresh(function), backend="eager", fullgraph=True)(torch.zeros(1)).item()
        except torch._dynamo.exc.Unsupported as refused:  # torch 2.9 does not look into torch.fx.traceback at all
            return type(refused)

    without = [whole(asks_the_tracer), whole(asks_the_notes)]
    with fx_patch.isolated():
        assert [whole(asks_the_tracer), whole(asks_the_notes)] == without
    assert without[0] == 1


def test_export_and_make_fx_see_their_own_flags() -> None:
    seen: list[tuple[bool, bool]] = []

    class Looks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.compiler.is_compiling(), torch.compiler.is_exporting()))
            return x + 1

    with fx_patch.isolated():
        torch.export.export(Looks(), (torch.ones(2),), strict=False)
        assert seen[-1] == (True, True)
        make_fx(doubled)(torch.ones(2))
        assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def test_a_module_with_hooks_compiles_beside_a_trace_in_another_thread() -> None:
    module = Net()
    calls: list[int] = []
    module.layers[0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.ones(2, 4)
    wanted = module(x)
    with fx_patch.isolated(), Held(trace_until_told):
        compiled = torch.compile(module, backend="eager")
        assert torch.equal(compiled(x), wanted)
        assert torch.equal(module(x), wanted)


def test_functions_given_to_fx_wrap_compile_whole_beside_a_trace() -> None:
    import math

    def uses_sqrt(x: torch.Tensor) -> torch.Tensor:
        return x * math.sqrt(4.0)

    with fx_patch.isolated(), Held(trace_until_told):
        assert torch.compile(uses_sqrt, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2
    assert isinstance(math.sqrt, types.BuiltinFunctionType)


# --- traces of several threads --------------------------------------------------------------------------------------
class Inlining(torch.fx.Tracer):
    """Handles module calls itself."""

    def call_module(self, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


def targets(graph: torch.fx.Graph) -> list[str]:
    return [f"{node.op} {node.target}" for node in graph.nodes]


def wait(barrier: threading.Barrier) -> None:
    barrier.wait(30)


def test_traces_that_overlap_in_time_each_get_their_own_graph() -> None:
    """All threads are inside their traced forward at the same moment, with different tracers."""
    alone = [targets(tracer().trace(Net())) for tracer in (torch.fx.Tracer, Inlining)]
    assert alone[0] != alone[1]
    inside = threading.Barrier(4)
    with fx_patch.isolated():
        graphs = in_threads(
            4,
            lambda number: targets(
                (torch.fx.Tracer, Inlining)[number % 2]().trace(Net(lambda: inside.wait(30) and None))
            ),
        )
        assert graphs == [alone[0], alone[1]] * 2
        assert symbolic_trace.CURRENT_PATCHER is None
    assert torch.nn.Module.__call__.__code__.co_filename == torch.nn.modules.module.__file__


def test_eager_modules_and_compiled_calls_pass_by_a_trace_held_open() -> None:
    module, x = Net(), torch.ones(2, 4)
    wanted = module(x)
    with fx_patch.isolated():
        compiled = torch.compile(doubled, backend="aot_eager")
        compiled(x)
        with Held(trace_until_told):
            assert not symbolic_trace.is_fx_tracing()
            assert torch.equal(module(x), wanted)
            assert torch.equal(compiled(torch.ones(7)), doubled(torch.ones(7)))  # compiles anew
            assert make_fx(Net())(x)(x).shape == (2, 4)


def test_a_compile_inside_a_trace_reverts_that_trace_only_and_puts_it_back() -> None:
    """Dynamo reverts the patches of the trace it is called in; the trace of another thread keeps its own."""
    elsewhere, x = Net(), torch.ones(2, 4)

    def as_dynamo_does() -> None:
        with symbolic_trace._maybe_revert_all_patches():
            assert elsewhere(x).shape == (2, 4)  # inside the trace this would be 'not installed as a submodule'

    with fx_patch.isolated():
        wanted = targets(torch.fx.symbolic_trace(Net()).graph)
        traced: list[list[str]] = []
        with Held(lambda pause: traced.append(targets(torch.fx.symbolic_trace(Net(pause)).graph))):
            assert targets(torch.fx.symbolic_trace(Net(as_dynamo_does)).graph) == wanted
        assert traced == [wanted]


@pytest.mark.skipif(not hasattr(torch.compiler, "_patch_engine_backward"), reason="this torch has no such context")
def test_backward_passes_by_another_threads_replacement_of_it() -> None:
    def replace(pause: Callable[[], None]) -> None:
        with torch.compiler._non_strict_tracing_context(), torch.compiler._patch_engine_backward():
            pause()

    x = torch.ones(2, requires_grad=True)
    with fx_patch.isolated(), Held(replace):
        (x * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]


# --- settings, generators -------------------------------------------------------------------------------------------
def test_settings_reach_threads_and_own_changes_stay_there() -> None:
    settings = torch._dynamo.config
    own = hazards.by_name("inherited-settings").present()  # up to 2.11 what a thread sets is set for all

    def read_and_change(number: int) -> int:
        read = settings.recompile_limit
        if own:
            settings.recompile_limit = 100 + number
        return read

    with fx_patch.isolated(), settings.patch(recompile_limit=77):
        assert in_threads(3, read_and_change) == [77, 77, 77]
        assert settings.recompile_limit == 77
    seen: list[int] = []
    with settings.patch(recompile_limit=78):
        thread = fx_patch.run_in_thread(lambda: seen.append(settings.recompile_limit), name="lane-3")
        thread.join()
    assert seen == [78] and thread.name == "lane-3"


def test_a_program_sets_pythons_generator_as_ever() -> None:
    import random

    with fx_patch.isolated():
        state = random.getstate()
        first = random.random()
        torch.compile(lambda x: x + 3, backend="eager")(torch.ones(2))
        random.setstate(state)
        assert random.random() == first
