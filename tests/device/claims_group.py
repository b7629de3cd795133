"""What the process group does: as torch documents its own for NCCL, with the settings of the watchdog that ttp/nccl.py names."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.device import backend
from tests.device.ranks import Rank

SUCCESS = "SUCCESS"


def _sim() -> Any:
    return torch.get_device_module(backend.NAME)


def _error(rank: Rank, group: Any = None) -> str:
    chosen: Any = group or dist.group.WORLD
    return str(chosen._get_backend(rank.device).get_error().name)


def _soon(rank: Rank, expected: str) -> None:
    """Wait until the communicator reports this."""
    deadline = time.monotonic() + 20.0
    while _error(rank) != expected:
        assert time.monotonic() < deadline, f"{_error(rank)}, expected {expected}"
        time.sleep(0.01)


def _number(rank: Rank, value: float = 1.0) -> torch.Tensor:
    return torch.full((4,), value, device=rank.device)


def collectives_carry_what_gloo_does(rank: Rank) -> None:
    """Each that ttp and torch's own wrappers use."""
    mine, world = float(rank.number + 1), range(1, rank.world + 1)
    x = _number(rank, mine)
    dist.all_reduce(x)
    assert x.tolist() == [sum(world)] * 4
    dist.all_reduce(x := _number(rank, mine), op=dist.ReduceOp.AVG)
    assert x.tolist() == [sum(world) / rank.world] * 4
    dist.broadcast(x := _number(rank, mine), src=1)
    assert x.tolist() == [2.0] * 4
    everyone = [torch.empty(4, device=rank.device) for _ in world]
    dist.all_gather(everyone, _number(rank, mine))
    assert [each[0].item() for each in everyone] == [float(each) for each in world]
    flat = torch.empty(4 * rank.world, device=rank.device)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(flat, _number(rank, mine))
    assert flat.view(-1, 4)[:, 0].tolist() == [float(each) for each in world]
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out := _number(rank), flat.clone())
    assert out.tolist() == [rank.world * mine] * 4
    dist.reduce_scatter(out := _number(rank), list(flat.view(-1, 4).unbind(0)))
    assert out.tolist() == [rank.world * mine] * 4
    after, before = (rank.number + 1) % rank.world, (rank.number - 1) % rank.world
    taken = _number(rank, 0.0)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, _number(rank, mine), after), dist.P2POp(dist.irecv, taken, before)]
    ):
        work.wait()
    assert taken.tolist() == [float(before + 1)] * 4
    dist.all_to_all_single(flat, torch.arange(4.0 * rank.world, device=rank.device))
    dist.barrier()
    assert _error(rank) == SUCCESS


def works_complete_on_their_stream(rank: Rank) -> None:
    """`wait` orders the current stream and blocks no thread."""
    if rank.number == 1:
        rank.await_all("looked", 0)
    x = _number(rank)
    _sim().synchronize()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    if rank.number == 0:
        assert not work.is_completed()
        side = _sim().Stream(rank.device)
        with _sim().stream(side):
            assert x.tolist() == [1.0] * 4  # too early
        rank.say("looked")
    assert x.tolist() == [2.0] * 4 and work.is_completed()


def abort_leaves_garbage_and_does_not_raise(rank: Rank) -> None:
    """The event fires, the wait returns; only `get_error` shows what has happened. A new collective is refused."""
    if rank.number == 1:
        rank.await_all("done", 0)
        return
    x = _number(rank)
    work = dist.all_reduce(x, async_op=True)
    event = _sim().Event()
    work.wait()
    event.record(_sim().current_stream(rank.device))
    assert not event.query() and _error(rank) == SUCCESS
    backend.set_traits(garbage=3)
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()
    assert work.wait() and x.tolist() == [0.0] * 4 and event.query() and work.is_success()
    assert _error(rank) == "COMM_ERROR"
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        assert "communicator was aborted" in str(error)
    else:
        raise AssertionError("a collective of an aborted communicator did not raise")
    rank.say("done")


def peer_that_dies_is_noticed_by_the_watchdog_alone(rank: Rank) -> None:
    """The collective hangs; nothing raises. With ttp's settings the process lives."""
    if rank.number == 1:
        rank.await_all("begun", 0)
        os._exit(7)
    backend.set_traits(remote_hangs=1)
    group, work = dist.group.WORLD, dist.all_reduce(_number(rank), async_op=True)
    rank.say("begun")
    _soon(rank, "COMM_ERROR")
    assert not work.is_completed()
    assert group is not None
    group.abort()
    _sim().synchronize()
    assert work.is_completed()


def blind_watchdog_notices_nothing(rank: Rank) -> None:
    """Then nothing shows that the result is garbage."""
    if rank.number == 1:
        rank.await_all("begun", 0)
        os._exit(7)
    backend.set_traits(blind_watchdog=1, remote_hangs=0)
    x = _number(rank)
    work = dist.all_reduce(x, async_op=True)
    rank.say("begun")
    assert work.wait() and x.tolist() == [1.0] * 4  # this rank's own
    assert _error(rank) == SUCCESS


def timeout_shows(rank: Rank) -> None:
    """In `get_error`; what else comes of it, TORCH_NCCL_ASYNC_ERROR_HANDLING says: with 2 an abort."""
    group = dist.new_group([0, 1], timeout=timedelta(milliseconds=300), backend=backend.BACKEND)
    if rank.number == 1:
        rank.await_all("done", 0)
        return
    work = dist.all_reduce(_number(rank), group=group, async_op=True)
    deadline = time.monotonic() + 20.0
    while _error(rank, group) != "TIMEOUT":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2":
        _sim().synchronize()
    assert work.is_completed() == (os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2")
    rank.say("done")


def waits_to_be_ended(rank: Rank) -> None:
    """A peer is gone: this rank waits for ever, unless its watchdog ends it."""
    if rank.number == 1:
        rank.await_all("begun", 0)
        os._exit(7)
    backend.set_traits(remote_hangs=1)
    dist.all_reduce(_number(rank), async_op=True)
    rank.say("begun")
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        time.sleep(0.01)


def fails_and_waits_to_be_ended(rank: Rank) -> None:
    """The device fails: the watchdog rethrows that, or not."""
    dist.all_reduce(_number(rank))
    backend.fail("an illegal address", rank.device.index)
    deadline = time.monotonic() + (1.0 if os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0" else 60.0)
    while time.monotonic() < deadline:
        time.sleep(0.01)


def stuck_watchdog(rank: Rank) -> None:
    """Its monitor ends the process, or not."""
    dist.all_reduce(_number(rank))
    backend.set_traits(stuck_watchdog=1)
    deadline = time.monotonic() + (2.5 if os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0" else 60.0)
    while time.monotonic() < deadline:
        time.sleep(0.01)
