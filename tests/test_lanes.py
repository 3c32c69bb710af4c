"""What a lane has of its own: code objects, names, and backward in its own thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from dflash_lib import fx_patch


def scaled(x: torch.Tensor, factor: float = 2.0, *, plus: float = 1.0) -> torch.Tensor:
    """Has defaults, and a function inside."""

    def inner(y: torch.Tensor) -> torch.Tensor:
        return y * factor + plus

    return inner(x)


def codes(code: Any) -> list[Any]:
    inner = [found for constant in code.co_consts if hasattr(constant, "co_code") for found in codes(constant)]
    return [code, *inner]


def test_an_own_entry_point_computes_the_same_and_shares_no_code_and_no_name() -> None:
    a, b = (fx_patch.own_entry_point(scaled, lane) for lane in ("drafter-0", "drafter-1"))
    x = torch.arange(3.0)
    assert torch.equal(a(x, plus=5.0), scaled(x, plus=5.0))
    assert a.__doc__ == scaled.__doc__ and a.__module__ == scaled.__module__
    names = [code.co_name for function in (scaled, a, b) for code in codes(function.__code__)]
    assert names == ["scaled", "inner", "scaled_drafter_0", "inner_drafter_0", "scaled_drafter_1", "inner_drafter_1"]


def test_closures_and_bound_methods_keep_what_they_hold() -> None:
    class Holder:
        weight = 3.0

        def call(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    holder, factor = Holder(), 4.0
    bound = fx_patch.own_entry_point(holder.call, "lane")
    assert bound(torch.ones(1)).item() == 3 and bound.__self__ is holder  # type: ignore[attr-defined]
    assert fx_patch.own_entry_point(lambda x: x * factor, "lane")(torch.ones(1)).item() == 4


def test_what_has_no_code_of_its_own_is_refused() -> None:
    for thing in (torch.sin, torch.nn.Linear(1, 1), torch.compile(scaled, backend="eager")):
        with pytest.raises(TypeError, match="has no Python code of its own"):
            fx_patch.own_entry_point(thing, "lane")


def test_each_lane_has_its_own_recompiles_and_its_own_dynamic_lengths() -> None:
    """Lane 1 has seen two lengths; lane 2's first compile is static all the same."""
    dynamic: dict[str, list[bool]] = {"a": [], "b": []}

    def compiled(lane: str) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            dynamic[lane].append(any(isinstance(value, torch.SymInt) for value in inputs))
            return graph

        return torch.compile(fx_patch.own_entry_point(scaled, f"own {lane}"), backend=backend)

    a, b = compiled("a"), compiled("b")
    for length in (16, 32, 48):
        a(torch.ones(length))
    b(torch.ones(64))
    assert dynamic == {"a": [False, True], "b": [False]}


def test_worker_context_is_the_threads_alone_and_ends() -> None:
    inside: list[bool] = []

    def work() -> None:
        with fx_patch.worker_context():
            inside.append(torch._C._is_multithreading_enabled())
        inside.append(torch._C._is_multithreading_enabled())

    thread = threading.Thread(target=work)
    with fx_patch.worker_context():
        thread.start()
        thread.join()
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()
    assert inside == [False, True]
