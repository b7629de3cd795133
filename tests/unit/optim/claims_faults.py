"""Claims about phases, rolling forward and torn updates. Each function runs on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.unit.optim.material import (
    everyone,
    fingerprints,
    job,
    make,
    make_net,
    params_digest,
    train,
)
from ttp.errors import CheckpointError, ProtocolError
from ttp.interfaces.update_tracker import NullTracker
from ttp.optim.replica_optimizer import (
    ClipNorm,
    LossScale,
    TTPReplicaOptimizer,
)
from ttp.proto.messages import CommitRecord


class Interrupted(Exception):
    pass


class LosesTheLastStep(NullTracker):
    """Raises in begin_update of `step`: the rank stands READY and its training thread is gone."""

    def __init__(self, step: int) -> None:
        self.step, self.record = step, None

    record: CommitRecord | None

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        if step == self.step:
            self.record = record
            raise Interrupted


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def kept_lines() -> Iterator[list[str]]:
    handler, logger = Kept(), logging.getLogger("ttp")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def silent_corruption_of_one_replica_is_found_and_named_once() -> None:
    """One bit of one moment on one rank: every rank knows the parameter and the two holders; the first rank logs it."""
    net = make_net()
    optimizer = make(net, compare_every=2)
    with kept_lines() as lines:
        train(optimizer, net, range(1, 5))
        assert not any(optimizer.divergences) and not lines
        shard = optimizer.layout.shards - 1
        victim, other = sorted(optimizer.layout.holders(shard))
        key, where = "", -1
        if job.rank == victim:
            held = optimizer.holdings()[optimizer.layout.group_id(shard)]
            target = next(tensor for tensor in held if tensor.key.endswith(".exp_avg"))
            key, where = target.key, target.start
            target.values[-1:].view(torch.int32).bitwise_xor_(1 << 12)
        key, where = everyone((key, where))[victim]
        train(optimizer, net, range(5, 9))
    found = {(d.key, d.start): d for d in optimizer.divergences}
    assert found[key, where].step == 6 and found[key, where].ranks == ((victim,), (other,)), found
    parameter = key.removeprefix("optim.state.").removesuffix(".exp_avg")
    assert all(parameter in divergence.key for divergence in optimizer.divergences), found
    assert len(set(everyone(optimizer.divergences))) == 1, "all ranks know the same"
    if job.rank == 0:
        assert lines and all("replicas differ in" in line for line in lines)
        assert sum(key in line for line in lines) == 1 and "step 6" in lines[0] and f"rank {victim}" in lines[0], lines
    else:
        assert not lines


def the_odd_one_out_of_three_replicas_is_named() -> None:
    net = make_net()
    optimizer = make(net, replicas=3, compare_every=0)
    train(optimizer, net, range(1, 3))
    if job.rank == 1:
        next(iter(optimizer.holdings().values()))[0].values[0] += 1.0
    (divergence,) = optimizer.compare_replicas()
    assert sorted(map(len, divergence.ranks)) == [1, 2] and (1,) in divergence.ranks


def in_thread(function: Any, *args: Any) -> Any:
    """Run on another thread, with grad mode and autocast of its own, and return or raise what it did."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((function(*args), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def roll_forward_gives_the_bits_of_the_main_path() -> None:
    """A side thread with the record ends where the training thread would have, whatever the scheduler did since."""
    kwargs: dict[str, Any] = {"clip": ClipNorm(0.3), "loss_scale": LossScale(256.0, growth_interval=4)}
    net, twin = make_net(), make_net()
    optimizer, straight = make(net, **kwargs), make(twin, **kwargs)
    tracker = LosesTheLastStep(4)
    optimizer.attach(tracker)
    train(straight, twin, range(1, 5))
    try:
        train(optimizer, net, range(1, 5))
        raise AssertionError("the tracker did not interrupt")
    except Interrupted:
        pass
    record = tracker.record
    assert record is not None and record == straight.last_record
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"], group["betas"] = 9.0, 9.0, (0.0, 0.0)
    optimizer.gradient_divisor = 77.0
    for wrong in (record.step - 1, record.step + 1):
        try:
            in_thread(optimizer.roll_forward, dataclasses.replace(record, step=wrong))
            raise AssertionError("rolled forward to a step that is not ready")
        except ProtocolError as error:
            assert "expected state" in str(error)
    assert fingerprints(optimizer) != fingerprints(straight)
    # What this rank knows by itself is never taken from a record: no order changes a learning rate or a loss scale.
    foreign = dataclasses.replace(record, learning_rates=(7.0,) * len(record.learning_rates), loss_scale=3.0)
    assert in_thread(optimizer.roll_forward, foreign) == 4
    assert fingerprints(optimizer) == fingerprints(straight)
    assert optimizer.host_state() == straight.host_state() and optimizer.loss_scale == straight.loss_scale == 512.0
    try:
        in_thread(optimizer.roll_forward, record)
        raise AssertionError("rolled forward twice")
    except ProtocolError:
        pass
    optimizer.close()
    straight.close()


def reduced_gradients_are_void_once_somebody_asks_for_a_gradient() -> None:
    """They may lie where backward accumulates: the tracker is informed before the caller can change them, and READY is over."""
    net = make_net()
    optimizer = make(net)
    tracker = LosesTheLastStep(2)
    optimizer.attach(tracker)
    with contextlib.suppress(Interrupted):
        train(optimizer, net, range(1, 3))
    reported: list[int] = []
    tracker.computing = reported.append  # type: ignore[method-assign,assignment]
    before = fingerprints(optimizer)
    assert not optimizer.gradient("up.weight").any(), "nothing of the step that was thrown away"
    assert reported == [2] and tracker.record is not None
    try:
        optimizer.roll_forward(tracker.record)
        raise AssertionError("rolled forward with gradients that are void")
    except ProtocolError as error:
        assert "not ready" in str(error)
    assert fingerprints(optimizer) == before
    optimizer.close()


def a_step_rolled_forward_at_the_gate_is_not_applied_twice() -> None:
    """The main thread finds the update done when the gate lets it in, and goes on to gather."""
    net, twin = make_net(), make_net()
    optimizer, straight = make(net), make(twin)

    class RollsForward(NullTracker):
        def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
            in_thread(optimizer.roll_forward, record)

    optimizer.attach(RollsForward())
    train(optimizer, net, range(1, 4))
    train(straight, twin, range(1, 4))
    assert fingerprints(optimizer) == fingerprints(straight) and params_digest(net) == params_digest(twin)
    optimizer.close()
    straight.close()


class Journal(NullTracker):
    """Writes down what the optimizer says, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def computing(self, step: int) -> None:
        self.lines.append(f"computing {step}")

    def ready(self, step: int) -> None:
        self.lines.append(f"ready {step}")

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        self.lines.append(f"begin {step} backup {backup_step}")

    def end_update(self, step: int) -> None:
        self.lines.append(f"end {step}")

    def fail_update(self, step: int) -> None:
        self.lines.append(f"fail {step}")


def the_phases_are_reported_in_order() -> None:
    """Tracker calls and points interleave as documented; an update that raises is failed, not ended."""
    net = make_net()
    optimizer = make(net, local_copy=True)
    journal = Journal()
    optimizer.attach(journal)
    optimizer.on_point = lambda name, step: journal.lines.append(f"point {name} {step}")
    train(optimizer, net, range(1, 3))
    for step in (1, 2):
        assert journal.lines[:9] == [
            f"computing {step}",
            f"point backward {step}",
            f"ready {step}",
            f"point ready {step}",
            f"point record {step}",
            f"begin {step} backup {step - 1}",
            f"point updating {step}",
            f"end {step}",
            f"point done {step}",
        ], journal.lines
        assert journal.lines[9] == f"point gathering {step}"
        del journal.lines[:10]
    assert not journal.lines

    def explode(name: str, step: int) -> None:
        if name == "updating":
            raise Interrupted

    optimizer.on_point = explode
    try:
        train(optimizer, net, range(3, 4))
        raise AssertionError("the injected exception vanished")
    except Interrupted:
        assert journal.lines == ["computing 3", "ready 3", "begin 3 backup 2", "fail 3"]
    optimizer.close()


def the_local_copy_is_the_step_before() -> None:
    """holdings(t - 1) has the bits of the state before the newest update, also when that update tore."""
    net = make_net()
    optimizer = make(net, local_copy=True, loss_scale=LossScale(8.0, growth_interval=2))
    states, hosts = {0: fingerprints(optimizer)}, {0: optimizer.host_state()}
    for step in range(1, 5):
        train(optimizer, net, range(step, step + 1))
        states[step], hosts[step] = fingerprints(optimizer), optimizer.host_state()
        assert fingerprints(optimizer, step - 1) == states[step - 1] != states[step]
        assert optimizer.host_state(step - 1) == hosts[step - 1] != hosts[step]
        try:
            optimizer.holdings(step - 2)
            raise AssertionError("a step that no rank kept")
        except CheckpointError as error:
            assert f"local copy of step {step - 1}" in str(error)

    def explode(name: str, step: int) -> None:
        if name == "updating":
            raise Interrupted

    optimizer.on_point = explode
    with contextlib.suppress(Interrupted):
        train(optimizer, net, range(5, 6))
    assert fingerprints(optimizer, 4) == states[4]
    for torn in (None, 5):
        try:
            optimizer.holdings(torn)
            raise AssertionError("a torn state was handed out")
        except CheckpointError as error:
            assert "in the middle of the update of step 5" in str(error)
    optimizer.close()


def a_barrier_spans_what_the_group_does_not() -> None:
    """Two data-parallel pairs share a model: an overflow in one skips the step in both, and no rank has a record early."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = torch.nn.Linear(8, 8)
    optimizer = TTPReplicaOptimizer(net.named_parameters(), lr=0.1, group=pairs[rank // 2], barrier=dist.group.WORLD)
    skipped = []
    for step in (1, 2, 3):
        optimizer.zero_grad()
        loss = net(torch.full((4, 8), float(rank + step))).square().mean()
        if step == 2 and rank == 0:
            loss = loss * float("inf")
        loss.backward()
        skipped.append(optimizer.step().skipped)
    assert skipped == [False, True, False], f"rank {rank}: {skipped}"

    # Rank 3 comes late to its barrier: no rank may hold the record of step 4 before.
    store, late = dist.distributed_c10d._get_default_store(), "barrier/late"
    optimizer.on_point = lambda point, step: store.set(f"barrier/{point}/{rank}", "1")
    if rank == 3:
        agree = optimizer._agree

        def last(*args: Any) -> Any:
            for other in range(3):
                store.wait([f"barrier/ready/{other}"])
            assert not any(store.check([f"barrier/record/{other}"]) for other in range(3)), "a record before READY"
            store.set(late, "1")
            return agree(*args)

        optimizer._agree = last  # type: ignore[method-assign,assignment]
    optimizer.zero_grad()
    net(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    assert store.check([late])
    optimizer.close()
