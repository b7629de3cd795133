"""Mistakes with a device, planted in ttp one at a time: the fault harness must see each.

python -m tests.device.mutants [PART OF A NAME]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ttp.checkpoint import host_copy
from ttp.errors import AbortedCollective
from ttp.optim import buckets, partition
from ttp.optim.device_stream import Lane
from ttp.optim.held_shards import HeldShards
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.optim.step_agreement.participation import Contribution
from ttp.optim.step_agreement.spanning import Spanning

Plant = Callable[[contextlib.ExitStack], None]


@dataclass(frozen=True)
class Mutant:
    """One mistake: what plants it, and the episodes that are to show it."""

    plant: Plant
    kinds: tuple[str, ...]
    when: str = "run"
    """`build`: as the optimizer and the copier are made; `run`: afterwards."""
    world: int = 2
    episodes: int = 20
    forced: dict[str, Any] = field(default_factory=dict)


def _instead(owner: Any, name: str, value: Any) -> Plant:
    return lambda stack: stack.enter_context(patch.object(owner, name, value))


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _side_at_once(self: Any) -> Any:
    return self._module.stream(self._side)


def _compute_stream(self: Any, device: torch.device) -> None:
    _copier_init(self, device)
    self._stream = self._module.default_stream(device)


_copier_init = host_copy.HostCopier.__init__
_copier_call = host_copy.HostCopier.__call__
_apply = TTPReplicaOptimizer._apply


def _made_later(stack: contextlib.ExitStack) -> None:
    def call(self: Any, values: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "_halves"):
            _copier_init(self, values.device)
        return _copier_call(self, values)

    stack.enter_context(patch.object(host_copy.HostCopier, "__init__", _nothing))
    host_copy.HostCopier.__call__ = call  # type: ignore[method-assign]  # stays: the first copy comes in the fault


def _marked_first(stack: contextlib.ExitStack) -> None:
    mark = Lane.mark_updated

    def apply(self: Any, record: Any) -> None:
        mark(self.lane)
        _apply(self, record)

    stack.enter_context(patch.object(TTPReplicaOptimizer, "_apply", apply))
    stack.enter_context(patch.object(Lane, "mark_updated", _nothing))


def _participants_only(self: Any, result: Any, size: int) -> None:
    if result[0] != size:
        raise AbortedCollective("some rank's contribution is missing")


def _take_at_once(self: Any, half: int, staged: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(staged)


def _one_half(self: Any, device: torch.device) -> None:
    _copier_init(self, device)
    self._halves[1] = self._halves[0]


def _gathers_unwaited(self: Any) -> None:
    self._works.clear()


def _sum_unwaited(self: Any, step: int, vector: torch.Tensor, group: Any) -> None:
    dist.all_reduce(vector, group=group, async_op=True)


def _fresh_stream(self: Any) -> Any:
    stream = self._module.Stream(self._device)
    for event in (self._ready, self._updated):
        if event is not None:
            stream.wait_event(event)
    return self._module.stream(stream)


def _applied_beside(self: Any, record: Any) -> None:
    with self.lane._module.stream(self.lane._side):
        _apply(self, record)


def _used_again(self: Any, numbers: Any) -> torch.Tensor:
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=True)
    given = host.to(self._device, non_blocking=True)
    host.zero_()
    return given


LATE = {"delay_us": 3000}
MUTANTS = {
    "the training stream does not wait for the reductions": Mutant(_instead(Lane, "join", _nothing), ("frozen",), forced=LATE),
    "reductions do not wait for the backward pass": Mutant(
        _instead(Lane, "side", _side_at_once), ("frozen",), world=4, forced=LATE
    ),
    "gradients are given back while another stream uses them": Mutant(
        _instead(Lane, "keep_for_side", _nothing), ("frozen",), world=4,
        forced={**LATE, "gradient_accumulation_shard": True, "poison": 1, "ring": False},
    ),
    "reduced gradients are used before their collective has ended": Mutant(
        _instead(buckets, "_wait", _nothing), ("frozen",), world=4, forced=LATE
    ),
    "the dump copies on the training thread's stream": Mutant(
        _instead(host_copy.HostCopier, "__init__", _compute_stream), ("hung_stop",), "build", forced={"point": "backward", "step": 2}
    ),
    "staging memory is allocated in the fault": Mutant(
        _made_later, ("stuck",), "build", forced={"alloc_syncs": 1, "point": "backward", "step": 2}
    ),
    "a roll forward meets kernels that are not loaded": Mutant(
        _instead(HeldShards, "warm_up", _nothing), ("stuck",), "build", episodes=30,
        forced={"lazy_load": 1, "point": "record", "step": 1, "base": "Adagrad"},
    ),
    "a roll forward makes a stream in the fault": Mutant(
        _instead(Lane, "after_ready", _fresh_stream), ("stuck",), forced={"alloc_syncs": 1, "point": "record"}
    ),
    "a roll forward is on the training thread's stream": Mutant(
        _instead(Lane, "after_ready", lambda self: contextlib.nullcontext()), ("hung_stop",), forced={"point": "record"}
    ),
    "a roll forward has ended once it is launched": Mutant(
        _instead(Lane, "drain", _nothing), ("stop",), forced={**LATE, "point": "record"}
    ),
    "a freeze does not wait for the device": Mutant(
        _instead(Lane, "drain_within", lambda self, timeout_s: True), ("slow",), forced={**LATE, "point": "updating", "lag_s": 0.0}
    ),
    "the update is marked before it is launched": Mutant(
        _marked_first, ("slow",), forced={**LATE, "point": "updating", "lag_s": 0.0}
    ),
    "a record is taken without a check of the participants": Mutant(
        _instead(Contribution, "check", _nothing), ("abort_waiting",), forced={"garbage": 0}
    ),
    "a record of an earlier step is taken": Mutant(
        _instead(Contribution, "check", _participants_only), ("abort_waiting",), forced={"garbage": 4, "step": 3}
    ),
    "ranks are READY before their gradients are final": Mutant(
        _instead(Lane, "await_ready", _nothing), ("abort_early",), forced={"garbage": 2}
    ),
    "a copy is read before it has ended": Mutant(
        _instead(host_copy.HostCopier, "_take", _take_at_once), ("frozen",), forced=LATE
    ),
    "both halves of the staging memory are one": Mutant(
        _instead(host_copy.HostCopier, "__init__", _one_half), ("frozen",), "build", episodes=60, forced=LATE
    ),
    "parameters are used before they are gathered": Mutant(
        _instead(partition.Gather, "finish", _gathers_unwaited), ("frozen",), world=4,
        forced={**LATE, "step": 4, "point": "done", "ring": False},
    ),
    "the step's collective is not waited for": Mutant(_instead(Spanning, "_sum", _sum_unwaited), ("frozen",), forced=LATE),
    "the update is on a stream that nothing waits for": Mutant(
        _instead(TTPReplicaOptimizer, "_apply", _applied_beside), ("frozen",), world=4,
        forced={**LATE, "step": 4, "point": "done", "ring": False},
    ),
    "memory that the device reads is used again too early": Mutant(
        _instead(Spanning, "_on_device", _used_again), ("frozen",), forced=LATE
    ),
    "communicators are not asked before a rank is READY": Mutant(
        _instead(Spanning, "check_communicators", _nothing), ("abort_early",), forced={"garbage": 2}
    ),
    "the settings of the watchdog are torch's own": Mutant(lambda stack: None, ("abort",)),
}  # fmt: skip


@contextlib.contextmanager
def planted(name: str, when: str) -> Iterator[None]:
    """Plant a mistake, if it is one of this moment. `name`: empty for none."""
    with contextlib.ExitStack() as stack:
        if name and MUTANTS[name].when == when:
            MUTANTS[name].plant(stack)
        yield


def main() -> int:
    from tests.device.campaign import caught

    part = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = 0
    for name in MUTANTS:
        if part in name:
            shown = caught(name)
            missed += not shown
            last = shown.strip().splitlines()[-1] if shown else ""
            print(f"{'caught' if shown else 'MISSED'}  {name}{': ' if last else ''}{last[:200]}", flush=True)
    print(f"{missed} mistakes were missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
