"""Meetings and sums across threads: against plain sums, with threads that come late, fail, or are called off."""

import threading
import time

import pytest
import torch

from dflash_lib.collective import Aborted, Barrier, Channel, Team


def in_threads(count, work):
    """Runs ``work(rank)`` in ``count`` threads; returns results and errors by rank."""
    results, errors = [None] * count, [None] * count

    def run(rank):
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a thread hangs"
    return results, errors


# --- Barrier ---------------------------------------------------------------------------------------------------------
def test_the_action_runs_once_a_turn_and_everybody_gets_its_result():
    barrier, calls = Barrier(4), []

    def work(rank):
        return [barrier.wait(rank, lambda turn=turn: calls.append(turn) or turn * 10) for turn in range(50)]

    results, errors = in_threads(4, work)
    assert errors == [None] * 4
    assert results == [[turn * 10 for turn in range(50)]] * 4
    assert calls == list(range(50))


def test_nobody_passes_before_the_last_has_come():
    barrier, here = Barrier(3), []

    def work(rank):
        time.sleep(0.05 * rank)
        here.append(rank)
        barrier.wait(rank)
        return len(here)

    results, _ = in_threads(3, work)
    assert results == [3, 3, 3]


def test_a_long_wait_names_who_is_missing_once():
    barrier, told = Barrier(3, patience=0.05), []

    def work(rank):
        if rank == 2:
            time.sleep(0.4)
        barrier.wait(rank, on_wait=lambda missing: told.append((rank, missing)))

    in_threads(3, work)
    assert sorted(told) == [(0, [2]), (1, [2])]


def test_abort_frees_those_who_wait_and_refuses_those_who_come_later():
    barrier = Barrier(3)

    def work(rank):
        if rank == 2:
            time.sleep(0.1)
            barrier.abort()
        barrier.wait(rank)

    _, errors = in_threads(3, work)
    assert [type(error) for error in errors] == [Aborted] * 3


def test_an_error_in_the_action_stays_with_its_thread_and_frees_the_others():
    barrier = Barrier(3)

    def fail():
        raise ZeroDivisionError("in the action")

    _, errors = in_threads(3, lambda rank: barrier.wait(rank, fail))
    assert sorted(type(error).__name__ for error in errors) == ["Aborted", "Aborted", "ZeroDivisionError"]


# --- sums ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 4097])
def test_a_sum_is_the_sum_and_all_buffers_end_equal(size, length):
    generator = torch.Generator().manual_seed(length)
    given = [torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(size)]
    expected = torch.stack(given).sum(0)
    team = Team([torch.device("cpu")] * size)
    buffers = [tensor.clone() for tensor in given]
    _, errors = in_threads(size, lambda rank: team.sum_(rank, buffers[rank]))
    assert errors == [None] * size
    for buffer in buffers:
        torch.testing.assert_close(buffer, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(buffer, buffers[0])


def test_the_order_of_additions_does_not_depend_on_who_comes_first():
    given = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(4)]
    sums = []
    for late in range(4):
        team, buffers = Team([torch.device("cpu")] * 4), [tensor.clone() for tensor in given]

        def work(rank, team=team, buffers=buffers, late=late):
            time.sleep(0.03 if rank == late else 0)
            team.sum_(rank, buffers[rank])

        in_threads(4, work)
        sums.append(buffers[0])
    assert all(torch.equal(one, sums[0]) for one in sums)


def test_several_devices_with_several_threads_each():
    """Two devices (the CPU under two numbers), three threads on the first: the road that GPUs take, by copies."""
    devices = [torch.device("cpu", 0), torch.device("cpu", 1), torch.device("cpu", 0), torch.device("cpu", 0)]
    team = Team(devices)
    buffers = [torch.full((10,), float(10**rank)) for rank in range(4)]
    _, errors = in_threads(4, lambda rank: [team.sum_(rank, buffers[rank]) for _ in range(2)])
    assert errors == [None] * 4
    for buffer in buffers:  # the second sum adds four copies of the first
        assert buffer.tolist() == [4444.0] * 10


def test_a_team_refuses_cpu_and_gpu_together():
    with pytest.raises(ValueError, match="mix"):
        Team([torch.device("cpu"), torch.device("cuda:0")])


def test_aborted_while_waiting_for_a_sum():
    team = Team([torch.device("cpu")] * 2)

    def work(rank):
        if rank == 1:
            time.sleep(0.1)
            team.abort()
            return
        team.sum_(rank, torch.zeros(3))

    _, errors = in_threads(2, work)
    assert isinstance(errors[0], Aborted)


def test_a_stray_is_named():
    team = Team([torch.device("cpu")] * 3)
    assert in_threads(3, lambda rank: team.strays(rank, 7))[0] == [[], [], []]
    assert in_threads(3, lambda rank: team.strays(rank, 8 if rank == 1 else 7))[0] == [[1], [1], [1]]


# --- across processes ------------------------------------------------------------------------------------------------
NODE = """
import sys, threading, torch, torch.distributed as dist
from dflash_lib.collective import Team, join_nodes
node, nodes = join_nodes()
team = Team([torch.device("cpu")] * 2)
buffers = [torch.full((1000,), 10.0 ** (2 * node + rank)) for rank in range(2)]
agreed, strays = [None] * 2, [None] * 2
def work(rank):
    team.sum_(rank, buffers[rank])
    agreed[rank] = team.meet(rank, lambda: team.agree([node, 5 - node]))
    strays[rank] = team.strays(rank, 3), team.strays(rank, node)
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
assert all(b.tolist() == [1111.0] * 1000 for b in buffers), buffers[0][:3]
assert agreed == [[1, 5], [1, 5]], agreed
assert strays == [([], [0, 1])] * 2, strays
dist.destroy_process_group()
print("node", node, "of", nodes, "done")
"""


def test_two_processes_of_two_threads_sum_and_agree(tmp_path):
    import os
    import socket
    import subprocess
    import sys

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE],
            env={**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    for rank, (node, output) in enumerate(zip(nodes, outputs, strict=True)):
        assert node.returncode == 0, output
        assert f"node {rank} of 2 done" in output


# --- Channel ---------------------------------------------------------------------------------------------------------
def test_a_channel_keeps_order_and_never_holds_more_than_its_size():
    channel, most = Channel(2), []

    def work(rank):
        if rank == 0:
            for item in range(200):
                channel.put(item)
                most.append(len(channel._items))
            return None
        return [channel.take() for _ in range(200)]

    results, errors = in_threads(2, work)
    assert errors == [None, None]
    assert results[1] == list(range(200))
    assert max(most) <= 2


@pytest.mark.parametrize("side", ["put", "take"])
def test_closing_a_channel_frees_who_waits_and_refuses_who_comes_later(side):
    channel, waited = Channel(1, patience=0.05), []

    def work(rank):
        if rank == 1:
            time.sleep(0.2)
            channel.close()
        elif side == "put":
            channel.put(1)
            channel.put(2, lambda: waited.append(True))
        else:
            channel.take(lambda: waited.append(True))

    _, errors = in_threads(2, work)
    assert isinstance(errors[0], Aborted)
    assert waited == [True]
    with pytest.raises(Aborted):
        channel.put(3)
