"""What the self-test says of the device: well of a sound one, and of one, or of a TTP, that is not, what is wrong."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import torch

import ttp
from tests.device import backend
from tests.device.ranks import Rank
from ttp.optim.device_stream import Lane
from ttp.selftest import blocked_step, device_probe
from ttp.selftest.blocked_step import READY_STEP, Blocked
from ttp.selftest.long_kernel import LongKernel
from ttp.selftest.report import FAILED, PASSED
from ttp.trainer.world import World


def streams_are_judged(rank: Rank) -> None:
    """Sound ones pass however slow launches are; with one hardware queue the copy waits; an event that is done at once is seen."""
    device_probe.BUSY_S = 4.0  # longer than this process stands still
    with backend.traits(delay_us=300, alloc_syncs=1, lazy_load=1, poison=1):
        sound = device_probe.streams(rank.device)
    assert sound.status == PASSED, sound
    with backend.traits(one_queue=1):
        queued = device_probe.streams(rank.device)
    assert queued.status == FAILED and "a copy on a stream of its own ends while the kernel runs" in queued.reason, (
        queued
    )
    sim: Any = torch.get_device_module(rank.device)
    waits, sim.Event.query = sim.Event.query, lambda event: True
    early = device_probe.streams(rank.device)
    sim.Event.query = waits
    assert early.status == FAILED and "an event behind the kernel is not done" in early.reason, early
    backend.fail("an illegal address", rank.device.index)
    broken = device_probe.streams(rank.device)
    assert broken.status == FAILED and "the device raised: sim error on device 0: an illegal address" in broken.reason


def kernel_of_matrix_products_is_as_long(rank: Rank) -> None:
    """Where the device's module has none that sleeps."""
    sim: Any = torch.get_device_module(rank.device)
    del sim._sleep
    kernel = LongKernel(rank.device)
    began = time.perf_counter()
    running = kernel.start(4.0)
    assert not running.query()
    running.synchronize()
    assert time.perf_counter() - began > 0.1  # other processes may have taken the cores while it was measured


def kernel_is_as_long_where_a_measurement_was_held_up(rank: Rank) -> None:
    """By other processes. The kernel was then shorter than what was looked at while it ran, and the device was said to be at fault."""
    sim: Any = torch.get_device_module(rank.device)
    sleeps, held_up = sim._sleep, [0.2]

    def slow_once(cycles: int) -> None:
        time.sleep(held_up.pop() if held_up else 0.0)
        sleeps(cycles)

    sim._sleep = slow_once
    kernel = LongKernel(rank.device)
    began = time.perf_counter()
    kernel.start(1.0).synchronize()
    assert not held_up and time.perf_counter() - began > 0.5


def ready_that_does_not_wait_is_seen(rank: Rank) -> None:
    """By the same hook as in the self-test's job."""
    blocked_step.READY_S = 4.0
    for mistaken in (False, True):
        if mistaken:
            Lane.await_ready = lambda self: None  # type: ignore[method-assign]
        folder = rank.folder / f"mistaken_{mistaken}"
        folder.mkdir()
        model = torch.nn.Linear(16, 16).to(rank.device)
        optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.1)
        trainer: Any = SimpleNamespace(device=rank.device, step=0, optimizer=optimizer)
        Blocked(World(0, 1, 0, True), folder).begin(trainer)
        for _ in range(READY_STEP):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(4, 16, device=rank.device)).square().mean())
            optimizer.step()
        (note,) = [json.loads(line) for line in (folder / "noted_0.jsonl").read_text().splitlines()]
        assert note["noted"] == "ready" and note["final"] is not mistaken, note
        optimizer.close()
