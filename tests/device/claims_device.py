"""What the device does: nothing is finished because it was launched, and memory, kernels and errors are as hostile as asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.device import backend
from tests.device.ranks import Rank
from ttp.adopt.trainer_state.fingerprint import Fingerprint

SOON_S = 0.2
"""What has not ended by then waits, where a test needs to know that it waits."""
LONG_S = 30.0
"""What does not wait ends within it, also where this process does not run for a while."""


def _ends(call: Callable[[], Any], within_s: float = SOON_S) -> threading.Thread | None:
    """Run a call on a thread; return the thread if it has not ended in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(within_s)
    return thread if thread.is_alive() else None


def _sim() -> Any:
    return torch.get_device_module(backend.NAME)


def launched_work_is_not_finished(rank: Rank) -> None:
    """Another stream reads what was there before; behind an event it reads the result."""
    sim, x = _sim(), torch.zeros(8, device=rank.device)
    sim.synchronize()
    side = sim.Stream(rank.device)
    backend.hang()
    x.add_(1)
    with sim.stream(side):
        early = x.clone()
    side.synchronize()
    assert not sim.current_stream().query()
    with sim.stream(side):
        assert early.cpu().sum() == 0
        side.wait_stream(sim.current_stream(rank.device))
    with sim.stream(side):
        side.wait_stream(sim.default_stream(rank.device))
        behind = x.clone()
    backend.release(rank.device.index)
    side.synchronize()
    assert behind.cpu().sum() == 8 and x.sum().item() == 8


def event_passes_with_its_stream(rank: Rank) -> None:
    """Neither earlier nor never."""
    sim = _sim()
    event = sim.Event()
    assert event.query()  # never recorded
    backend.hang()
    event.record(sim.current_stream(rank.device))
    assert not event.query()
    waiting = _ends(event.synchronize)
    assert waiting is not None
    backend.release(rank.device.index)
    waiting.join(30.0)
    assert event.query() and not waiting.is_alive()


def copies_are_asynchronous(rank: Rank) -> None:
    """To and from pinned memory; what is pageable is copied before the call returns."""
    sim = _sim()
    host = torch.zeros(4).pin_memory()
    assert host.is_pinned() and not torch.zeros(4).is_pinned()
    x = torch.ones(4, device=rank.device)
    backend.hang()
    host.copy_(x, non_blocking=True)
    assert host.sum() == 0
    given = torch.full((4,), 2.0).pin_memory()
    late = torch.empty(4, device=rank.device)
    late.copy_(given, non_blocking=True)
    given.fill_(3.0)  # too early: the device reads it later
    assert _ends(lambda: x.cpu()) is not None
    backend.release(rank.device.index)
    sim.synchronize()
    assert host.sum() == 4 and late.cpu().sum() == 12


def hung_kernel_holds_up_its_own_stream_only(rank: Rank) -> None:
    """With one hardware queue it holds up all that is submitted behind work of its stream."""
    sim = _sim()
    x = torch.ones(4, device=rank.device)
    side = sim.Stream(rank.device)
    sim.synchronize()
    for one_queue in (0, 1):
        with backend.traits(one_queue=one_queue):
            backend.hang()
            x.add_(1)

            def read() -> None:
                with sim.stream(side):
                    x.cpu()

            stuck = _ends(read, SOON_S if one_queue else LONG_S)
            assert (stuck is not None) == bool(one_queue)
            backend.release(rank.device.index)
            if stuck is not None:
                stuck.join(30.0)
            sim.synchronize()


def new_memory_and_new_kernels_wait_for_the_device(rank: Rank) -> None:
    """Where the traits are set; memory that was freed, and a kernel that has run, do not."""
    sim = _sim()
    kept = torch.ones(1 << 12, device=rank.device)
    kept.mul_(2)
    side = sim.Stream(rank.device)
    sim.synchronize()

    def on_side(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            sim.set_device(rank.device)
            with sim.stream(side):
                call()

        return run

    on_side(lambda: torch.empty(1 << 10, device=rank.device))()  # freed at once: the side stream has it
    with backend.traits(alloc_syncs=1, lazy_load=1):
        backend.hang()
        assert _ends(on_side(lambda: torch.empty(1 << 10, device=rank.device)), LONG_S) is None
        assert _ends(on_side(lambda: kept.mul_(2)), LONG_S) is None
        stuck = [
            _ends(on_side(lambda: torch.empty(1 << 16, device=rank.device))),
            _ends(on_side(lambda: kept.erfinv_())),
        ]
        assert None not in stuck
        backend.release(rank.device.index)


def memory_that_another_stream_uses_is_lost_without_a_record(rank: Rank) -> None:
    """`record_stream` keeps it."""
    sim = _sim()
    side = sim.Stream(rank.device)
    with backend.traits(poison=1):
        for recorded in (True, False):
            x = torch.ones(1 << 10, device=rank.device)
            seen = torch.zeros(1 << 10, device=rank.device)
            sim.synchronize()
            backend.hang(side)
            with sim.stream(side):
                seen.copy_(x)
            if recorded:
                x.record_stream(side)
            del x
            other = torch.zeros(1 << 10, device=rank.device)
            sim.current_stream().synchronize()
            backend.release(rank.device.index)
            sim.synchronize()
            assert (seen.cpu().sum().item() == 1 << 10) == recorded
            del other


def error_stays(rank: Rank) -> None:
    """After one, every call fails."""
    sim, x = _sim(), torch.ones(4, device=rank.device)
    event = sim.Event()
    event.record(sim.current_stream(rank.device))
    backend.fail("an illegal address", rank.device.index)
    for call in (lambda: x.add_(1), x.cpu, sim.synchronize, event.query, event.synchronize, sim.Stream):
        try:
            call()
        except RuntimeError as error:
            assert "sim error on device 0: an illegal address" in str(error), error
        else:
            raise AssertionError(f"{call} did not fail")


def training_has_the_same_bits_however_hostile_it_is(rank: Rank) -> None:
    """Forward, backward, clipping and AdamW in three forms; and the host's numbers, up to the rounding of other kernels."""
    hostile = {"delay_us": 200, "poison": 1, "late_release": 1}
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        host = _trained(torch.device("cpu"), rank.seed, options)
        mild = _trained(rank.device, rank.seed, options)
        with backend.traits(**hostile):
            again = _trained(rank.device, rank.seed, options)
        assert all(torch.equal(a, b) for a, b in zip(mild, again, strict=True)), options
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(host, mild, strict=True)), options


def _trained(device: torch.device, seed: int, options: dict[str, bool]) -> list[torch.Tensor]:
    """Return the loss and the parameters after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 32)
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    for _ in range(3):
        tokens = torch.randint(32, (4, 8)).to(device)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach().cpu(), *(param.detach().cpu() for param in model.parameters())]


def storage_can_be_given_back_and_grown(rank: Rank) -> None:
    """As gradients that are kept only while they travel."""
    x = torch.ones(64, device=rank.device)
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(x.nbytes)
    x.fill_(2.0)
    assert x.sum().item() == 128
    assert torch.arange(5, device=rank.device).tolist() == [0, 1, 2, 3, 4]
    assert x.nonzero().numel() == 64


def fingerprint_is_known_once_the_copy_has_arrived(rank: Rank) -> None:
    """That of the same batch on the CPU, though it is changed in place meanwhile; `known` does not wait."""
    sim = _sim()
    host: dict[str, Any] = {"x": torch.arange(1000.0), "y": torch.arange(12, dtype=torch.int16), "z": ["a", 3]}
    expected = Fingerprint(host).value()
    batch = {key: value.to(rank.device) if torch.is_tensor(value) else value for key, value in host.items()}
    assert Fingerprint(batch).value() == expected != ""  # the sampled places are on the device now
    backend.hang()
    found = Fingerprint(batch)
    assert found.known() == ""
    batch["x"].zero_()
    waiting = _ends(found.value)
    assert waiting is not None and found.known() == ""
    backend.release(rank.device.index)
    waiting.join(30.0)
    sim.synchronize()
    assert found.known() == found.value() == expected


def forked_process_cannot_use_it(rank: Rank) -> None:
    """Threads do not survive a fork."""
    torch.ones(4, device=rank.device).sum().item()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(4, device=rank.device)
        except RuntimeError as error:
            os._exit(0 if "before this process was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def synchronisations_are_counted(rank: Rank) -> None:
    """Those of the host with the device, and nothing else."""
    sim, x = _sim(), torch.ones(4, device=rank.device)
    before = backend.counts()["syncs"]
    y = x * 2 + x
    y.add_(1)
    assert backend.counts()["syncs"] == before
    y.sum().item()
    sim.synchronize()
    y.cpu()
    torch.empty(4).copy_(y, non_blocking=True)  # into pageable memory
    torch.tensor([1.0], device=rank.device)  # from pageable memory
    assert backend.counts()["syncs"] == before + 5
    backend.sleep(5.0)  # longer than this process stands still; its end waits for it
    assert not sim.current_stream().query(), "it was waited for"
