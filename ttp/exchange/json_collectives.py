"""Small JSON values between all ranks of the job, by torch's collectives: used at start, resume, periodic saves, and when
replicas were found to differ; never per step and never at a fault."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ttp.config import launched_ranks
from ttp.errors import ConfigError
from ttp.groups.polled_wait import wait_for

# torch 2.13 gave the collective a new name and warns of the old one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange_json(value: Any, device: torch.device, group: Any = None) -> list[Any]:
    """Return every rank's value, in rank order (all ranks of `group` call, WORLD unless given; one process: its own value)."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [json.loads(json.dumps(value))]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    world = dist.get_world_size(group)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    number = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    wait_for([_all_gather(sizes, number, group=group, async_op=True)])
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    everyone = torch.zeros(world * longest, dtype=torch.uint8, device=device)
    wait_for([_all_gather(everyone, padded, group=group, async_op=True)])
    rows = everyone.view(world, longest).cpu()
    return [json.loads(bytes(rows[r, : int(n)].numpy().tobytes())) for r, n in enumerate(sizes.tolist())]


def send_bytes(chunk: memoryview, rank: int, device: torch.device) -> None:
    """Send a chunk to a rank, which calls `receive_bytes` for as many bytes."""
    wait_for([dist.isend(torch.frombuffer(chunk, dtype=torch.uint8).to(device), dst=rank)])


def receive_bytes(chunk: memoryview, rank: int, device: torch.device) -> None:
    """Fill a chunk from what a rank sends."""
    host = torch.frombuffer(chunk, dtype=torch.uint8)
    if device.type == "cpu":
        wait_for([dist.irecv(host, src=rank)])
        return
    received = torch.empty_like(host, device=device)
    wait_for([dist.irecv(received, src=rank)])
    host.copy_(received)


def broadcast_json(value: Any, device: torch.device) -> Any:
    """Return rank 0's value on every rank (all ranks call; the others' value is ignored)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return json.loads(json.dumps(value))
    first = dist.get_rank() == 0
    body = json.dumps(value).encode() if first else b""
    size = torch.tensor([len(body)], dtype=torch.int64, device=device)
    wait_for([dist.broadcast(size, src=0, async_op=True)])
    content = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if first:
        content = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(device)
    wait_for([dist.broadcast(content, src=0, async_op=True)])
    return json.loads(content.cpu().numpy().tobytes())


def world() -> tuple[int, int]:
    """Return (rank, world_size) of this process, (0, 1) without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def check_joined(caller: str) -> None:
    """Refuse a call that comes before this rank has joined the others: every rank would take itself for a job of one.

    Raises ConfigError.
    """
    if (ranks := launched_ranks()) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{caller} was called without a process group: got WORLD_SIZE={ranks}, expected a process group of {ranks} ranks. Call"
            f" torch.distributed.init_process_group before {caller}"
        )


class JobRanks:
    """The job's ranks (`ttp.checkpoint.store.Peers`)."""

    def __init__(self, device: torch.device) -> None:
        self.index, self.count = world()
        self._device = device

    def exchange(self, value: Any) -> list[Any]:
        return exchange_json(value, self._device)

    def send(self, chunk: memoryview, rank: int) -> None:
        send_bytes(chunk, rank, self._device)

    def receive(self, chunk: memoryview, rank: int) -> None:
        receive_bytes(chunk, rank, self._device)
