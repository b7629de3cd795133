"""Claims about what is done when replicas differ. Each function runs on every rank of three that hold the same shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.optim.claims_faults import kept_lines
from tests.unit.optim.material import everyone, fingerprints, job, make, make_net, train
from ttp.errors import ConfigError, ReplicasDiffer, WrongPeer, WrongReplica
from ttp.exchange.json_collectives import exchange_json
from ttp.interfaces.update_tracker import NullTracker
from ttp.optim import replica_check, sums
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.proto.messages import Digest


class Reported(NullTracker):
    """Keeps what a rank reports of replicas that differ."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[Digest, ...]]] = []

    def dispute(self, step: int, digests: tuple[Digest, ...]) -> None:
        self.calls.append((step, digests))


def _alter(optimizer: TTPReplicaOptimizer, *ranks: int) -> None:
    """Alter one bit on these ranks, another one on each."""
    if job.rank in ranks:
        held = next(iter(optimizer.holdings().values()))
        target = next(tensor for tensor in held if tensor.key.endswith(".exp_avg"))
        target.values[:1].view(torch.int32).bitwise_xor_(1 << (12 + job.rank))


def _trained(choice: str, **options: int) -> tuple[TTPReplicaOptimizer, Reported]:
    net, tracker = make_net(), Reported()
    optimizer = make(net, replicas=3, on_divergence=choice, **{"compare_every": 0, **options})
    optimizer.attach(tracker)
    optimizer.on_divergence.checkpoint_before = lambda step: f"/there/iter_{step:07d}"
    train(optimizer, net, range(1, 3))
    optimizer.check_replicas()
    assert not tracker.calls and optimizer.on_divergence.equal_after == 2
    train(optimizer, net, range(3, 5))
    return optimizer, tracker


def most_holders_prove_a_replica_wrong() -> None:
    """Each rank reports what it has read itself, before any can know who is wrong; the controller judges by the same digests."""
    optimizer, tracker = _trained("repair")
    _alter(optimizer, 1)

    def reported_before(*args: Any) -> Any:
        assert tracker.calls, "the gate has the digests before any rank can know who is wrong"
        return exchange_json(*args)

    expected = WrongReplica if job.rank == 1 else WrongPeer
    words = r"step 4: replicas differ in .*rank 1 against ranks 0, 2; they were equal after step 2"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(expected, match=words):
        patch.setattr(replica_check, "exchange_json", reported_before)
        optimizer.check_replicas()
    ((step, digests),) = tracker.calls
    assert step == 4 and all(digest.holders == 3 for digest in digests)
    known = {digest.group_id for digest in digests}
    assert known <= {group.group_id for group in optimizer.shard_groups()}
    values = everyone(sorted((digest.group_id, digest.value) for digest in digests))
    assert values[0] == values[2] != values[1] and len(set(map(len, values))) == 1


def without_a_majority_the_step_ends() -> None:
    optimizer, _ = _trained("repair")
    _alter(optimizer, 0, 1)
    with pytest.raises(
        ReplicasDiffer, match=r"rank 0 against rank 1 against rank 2; .*Resume from /there/iter_0000002,"
    ):
        optimizer.check_replicas()


def a_copy_of_one_of_two_that_differ_proves_nothing() -> None:
    """Rank 2 was filled from rank 0: the controller does not count what it has, and so no message has it that most agree."""
    optimizer, tracker = _trained("repair")
    _alter(optimizer, 1)
    optimizer.on_divergence.filled = (2,)
    with pytest.raises(ReplicasDiffer, match=r"rank 1 against ranks 0, 2; .*Resume from /there/iter_0000002,"):
        optimizer.check_replicas()
    assert tracker.calls, "the controller judges by the digests"
    optimizer.on_divergence.filled = (1,)
    with pytest.raises(WrongReplica if job.rank == 1 else WrongPeer):
        optimizer.check_replicas()


def who_asks_for_an_end_has_one() -> None:
    """Although two of three agree; at the step that is compared, not before."""
    net = make_net()
    optimizer = make(net, replicas=3, on_divergence="stop", compare_every=3)
    train(optimizer, net, range(1, 2))
    _alter(optimizer, 2)
    train(optimizer, net, range(2, 3))
    with pytest.raises(
        ReplicasDiffer, match=r"equal after step 0, .*No checkpoint from before it was found in any directory"
    ):
        train(optimizer, net, range(3, 4))
    assert optimizer.current_step == 3


def what_was_only_misread_ends_nothing() -> None:
    """A first look that sees other bits than are there is contradicted by the second."""
    optimizer, tracker = _trained("stop")
    assert not optimizer.compare_replicas() and optimizer.on_divergence.equal_after == 2, (
        "a group's comparison is not the job's"
    )
    before, real = fingerprints(optimizer), sums.sums_of
    looks: list[int] = []

    def wrong_once(tensors: list[torch.Tensor]) -> torch.Tensor:
        looks.append(len(tensors))
        return real(tensors) + (job.rank == 2 and len(looks) == 1)

    setattr(replica_check, "sums_of", wrong_once)  # noqa: B010 - a name that it has imported
    try:
        with kept_lines() as lines:
            optimizer.check_replicas()
    finally:
        setattr(replica_check, "sums_of", real)  # noqa: B010
    assert [bool(digests) for _, digests in tracker.calls] == [True, False], "reported, and withdrawn"
    assert any("seemed to differ" in line for line in lines) and fingerprints(optimizer) == before
    assert optimizer.on_divergence.equal_after == 4 and not optimizer.divergences


def a_report_is_all_that_follows_by_default() -> None:
    optimizer, tracker = _trained("report")
    _alter(optimizer, 1)
    optimizer.check_replicas()
    assert optimizer.divergences and not tracker.calls and optimizer.on_divergence.equal_after == 2
    with pytest.raises(ConfigError, match="invalid on_divergence: got 'fix', expected 'report', 'stop', 'repair'"):
        make(make_net(), replicas=3, on_divergence="fix")
