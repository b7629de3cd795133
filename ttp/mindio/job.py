"""One process's part in the job, as MindIO's functions declare it, and the session that comes of it.

Owns what was declared (handlers, ranks, the optimizer) and the order of the start. The protocol is the session's: this
gives it the optimizer's core and a publisher that calls the trainer's handlers.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ttp import session as sessions
from ttp.config import Settings, enabled, host_name
from ttp.errors import ConfigError, Overtaken
from ttp.exchange.json_collectives import exchange_json, world
from ttp.mindio.model_parallel import ModelParallel, read_parallel_state
from ttp.mindio.saving.local_save import LocalSave
from ttp.mindio.saving.publisher import HandlerPublisher
from ttp.mindio.saving.save_calls import Watcher
from ttp.mindio.saving.save_handlers import RenameHandler, SaveHandler
from ttp.mindio.saving.step_args import StepArgsBox
from ttp.mindio.state_files.whole_state import WholeState
from ttp.optim.replica_optimizer import TTPReplicaOptimizer
from ttp.optim.shard_layout.placement import grid
from ttp.optim.step_agreement.participation import Ending
from ttp.proto.messages import Cause, CauseKind
from ttp.runtime.rank_runtime import Protection, show
from ttp.session import Session

DEFAULT_PORT = 8000
LONG_PAUSE_S = sessions.SAVE_AT_MOST_S

_current: MindioJob | None = None


def current_job() -> MindioJob:
    """Return this process's job; there is one, as MindIO's functions have it."""
    global _current
    if _current is None:
        _current = MindioJob()
    return _current


def forget_job() -> None:
    """End this process's session and forget all that was declared."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """What `build_optimizer_replica_group` made for this rank."""

    dp_ranks: tuple[int, ...]
    shard_group: Any
    """The ranks that hold every shard once: half of them where their number is even (which half follows from their nodes), else all."""


class JobOptimizer(Protocol):
    """What the job needs of its optimizer (`ttp.mindio.optimizer`)."""

    core: TTPReplicaOptimizer
    place: ModelParallel
    local_copy: bool
    ending: Ending
    current_step: int

    def start_updating(self) -> None: ...

    def end_updating(self, step: int) -> None: ...

    def show(self, state: WholeState) -> None: ...

    def leave_to_save_rank(self) -> None: ...

    def part_tensors(self) -> dict[str, tuple[int, ...]]: ...


class MindioJob:
    """Everything that was declared in this process."""

    def __init__(self) -> None:
        self.step_args = StepArgsBox()
        self.save_handler: SaveHandler | None = None
        self.rename_handler: RenameHandler | None = None
        self.groups: ReplicaGroups | None = None
        self.parallel_state: Any = None
        """What `set_parallel_state` was given; None: the trainer's module of that name."""
        self.optimizer: JobOptimizer | None = None
        self.local_copy: bool | None = None
        """As given to `ttp_init_processor`; None before."""
        self.in_train = False
        """The function that `ttp_to_persist` has decorated is running."""
        self.parts: Sequence[Sequence[int]] = ()
        """The ranks of each model part; known from `start_processor` on."""
        self.tls_noted = False
        """The trainer was warned that messages are not encrypted."""
        self._checked = False
        self._watcher: Watcher | None = None
        self._session: Session | None = None
        self._controller_port: int | None = None
        self._pause: float | None = None

    # --- the start ---

    def init_controller(self, rank: int, world_size: int, enable_local_copy: bool) -> None:
        self._check_world(rank, world_size, "controller")
        self._check_local_copy(enable_local_copy)

    def start_controller(self, ip: str, port: int) -> None:
        """Note the port: the controller starts with rank 0's processor, and publishes its address through the job's store."""
        self._controller_port = _port(ip, port)

    def init_processor(
        self, rank: int, dp_ranks: Sequence[int] | None, dp_size: int | None, world_size: int, enable_local_copy: bool
    ) -> None:
        """Check what was declared. Raises ConfigError."""
        self._check_world(rank, world_size, "processor")
        if dp_ranks is not None and (len(dp_ranks) != dp_size or rank not in dp_ranks):
            raise ConfigError(
                f"rank {rank}: dp_ranks: got {list(dp_ranks)} and dp_size {dp_size}, expected as many ranks, this one among them"
            )
        if dp_ranks is not None:
            check_data_ranks(dp_ranks, self.place())
        self._check_local_copy(enable_local_copy)
        self.local_copy = enable_local_copy

    def start_processor(self, ip: str, port: int) -> None:
        """Start this rank's session, and on rank 0 the controller (all ranks call). Raises ConfigError, ControllerError."""
        port = _port(ip, port)
        if self.local_copy is None:
            raise ConfigError("ttp_start_processor before ttp_init_processor: call them in this order, on every rank")
        if self.optimizer is None:
            raise ConfigError(
                "ttp_start_processor without an optimizer: build ttp.mindio.modellink.TTPReplicaOptimizer (or"
                " TTPOddReplicaOptimizer) first; an optimizer of another kind cannot be protected through ttp.mindio"
            )
        if self._controller_port not in (None, port):
            raise ConfigError(f"processor port: got {port}, expected the controller's, {self._controller_port}")
        settings = Settings.from_env()
        if not settings.shared_dirs:
            raise ConfigError(
                "TTP_SHARED_DIRS is False: the save rank of ttp.mindio reads the shards of all nodes; let all nodes share"
                f" {settings.mindio_dir} (TTP_MINDIO_DIR), and leave TTP_SHARED_DIRS out"
            )
        if not settings.controller_port:
            settings = dataclasses.replace(settings, controller_port=port)
        core, (rank, world_size) = self.optimizer.core, world()
        gathered = exchange_json(self.optimizer.place.part, core.device)
        self.parts = [[other for other, its in enumerate(gathered) if its == part] for part in sorted(set(gathered))]
        save = LocalSave(rank, core, self)
        self._session = sessions.start(
            core,
            save_dirs=[settings.mindio_dir],
            layout={"interface": "mindio", "model_parts": sorted(set(gathered))},
            settings=settings,
            publisher=HandlerPublisher(rank, core, self, save),
        )
        core.on_divergence.checkpoint_before = _checkpoint_before
        atexit.register(self.close)
        if (protection := self._session.protection) is not None:
            protection.gate.lets_go = True
            core.spanning.abandons = self._abandon
            if world_size > 1:
                gate, root = protection.gate, Path(settings.mindio_dir).resolve()
                self._watcher = Watcher(rank, root, save, lambda: gate.closed)
                self._watcher.start()
            if rank == 0:
                show(logging.INFO, _mode(self.optimizer.local_copy))

    def close(self) -> None:
        """Stop this process's part. Doing it twice is harmless."""
        atexit.unregister(self.close)
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def _check_world(self, rank: int, world_size: int, what: str) -> None:
        if (rank, world_size) != world():
            raise ConfigError(
                f"{what}: got rank {rank} of {world_size}, expected {world()[0]} of {world()[1]} as in torch.distributed"
            )

    def _check_local_copy(self, enable_local_copy: bool) -> None:
        if self.optimizer is not None and self.optimizer.local_copy != enable_local_copy:
            raise ConfigError(
                f"enable_local_copy is {enable_local_copy}, the optimizer was built with local_copy={self.optimizer.local_copy}:"
                " pass args.local_copy_os to both"
            )

    # --- what the optimizer needs ---

    def place(self) -> ModelParallel:
        """Return which part of the model this rank has, as the trainer's parallel_state reports it. Raises ConfigError."""
        return read_parallel_state(self.parallel_state) or ModelParallel()

    def declare(self, groups: ReplicaGroups) -> None:
        """Note a data-parallel group of this rank: the first one declared is that of all parameters but the experts'."""
        if self.groups is None or self.groups.dp_ranks == groups.dp_ranks:
            self.groups = groups

    def built(self, optimizer: JobOptimizer) -> ModelParallel:
        """Take note of the optimizer; return which part of the model this rank has. Raises ConfigError."""
        if self._session is not None:
            raise ConfigError("an optimizer is built before ttp_start_processor, and one only is protected")
        place = self.place()
        if self.groups is not None:
            check_data_ranks(self.groups.dp_ranks, place)
        self.optimizer = optimizer
        if self.local_copy is not None:
            self._check_local_copy(self.local_copy)
        return place

    def start_updating(self, backup_step: int) -> None:
        self._optimizer("ttp_start_updating_os").start_updating()

    def end_updating(self, step: int) -> None:
        self._optimizer("ttp_end_updating_os").end_updating(step)

    def _optimizer(self, name: str) -> JobOptimizer:
        if self.optimizer is None:
            raise ConfigError(f"{name} without an optimizer: build ttp.mindio.modellink.TTPReplicaOptimizer first")
        return self.optimizer

    def overtaken_after(self, error: RuntimeError, step: int) -> bool:
        """A collective of `step` raised: say whether the step was rolled forward on this rank."""
        return self._protection is not None and self._protection.overtaken_after(error, step)

    def settle(self, step: int) -> None:
        """The trainer begins something new: all that counts steps or samples is that of `step`. Waits for good when this rank's
        training is over, because its last step was finished by the work thread."""
        optimizer = self._optimizer("a step")
        if not self._checked:
            self._checked = True
            self._say_what_is_missing()
        self.step_args.settle(step, optimizer.core.device)
        if self._protection is not None and self._protection.gate.final:
            self._protection.hold()
        optimizer.core.boundary(step, optimizer.ending)

    def _say_what_is_missing(self) -> None:
        """After the first step, once: what a fault would find missing, when it is too late to add it."""
        if world()[0] or not enabled():
            return
        if self._session is None:
            show(logging.WARNING, "nothing is protected: a step was done without ttp_start_processor")
            return
        missing = {
            "ttp_register_save_ckpt_handler": self.save_handler is None,
            "ttp_register_rename_handler": self.rename_handler is None,
            "ttp_set_ckpt_args after every iteration": self.step_args.empty,
        }
        if calls := [call for call, is_missing in missing.items() if is_missing]:
            show(logging.WARNING, f"a fault would save nothing: the trainer has not called {', '.join(calls)}")
        if not self.in_train:
            show(
                logging.WARNING,
                "the training loop runs outside of a function decorated with ttp.mindio.ttp_to_persist: what the trainer does by itself"
                " at an exception (except, finally) comes before this rank's shards are saved",
            )

    def long_pause(self) -> None:
        """A periodic checkpoint is being written: until the next step, nothing counts as a hang."""
        if self._protection is not None and self._pause is None:
            self._pause = self._protection.processor.pause(LONG_PAUSE_S)

    def end_pause(self) -> None:
        if self._protection is not None and self._pause is not None:
            self._protection.processor.end_pause(self._pause)
            self._pause = None

    @property
    def _protection(self) -> Protection | None:
        return None if self._session is None else self._session.protection

    def _abandon(self, step: int) -> None:
        if self._protection is not None and self._protection.gate.overtook(step):
            raise Overtaken(f"the update of step {step} was done by the work thread")

    # --- what the trainer says ---

    def step_done(self, args: Any) -> None:
        """The trainer has finished a step."""
        optimizer = self.optimizer
        if optimizer is None:
            raise ConfigError(
                "ttp_set_ckpt_args without an optimizer: build ttp.mindio.modellink.TTPReplicaOptimizer first"
            )
        self.step_args.put(optimizer.current_step, args)

    def report_fault(self, text: str) -> None:
        """The trainer reports a fault of this rank. Follow with `hold`."""
        if self._protection is not None:
            self._protection.processor.release_at_exit()  # the trainer exits by itself, when `hold` has returned
            self._protection.processor.fault(Cause(CauseKind.EXCEPTION, (world()[0],), text), "")

    def hold(self) -> None:
        """Keep this rank's shards available until the fault's checkpoint is saved."""
        if self._protection is not None:
            self._protection.hold()

    def preempt(self, text: str) -> bool:
        """Have all ranks finish the step in flight, save it and exit; False where nothing is protected."""
        if self._protection is not None:
            self._protection.processor.preempted(text)
        return self._protection is not None

    @property
    def frozen(self) -> bool:
        """This rank is stopped by a fault."""
        return self._protection is not None and self._protection.gate.closed

    # --- what the publisher needs ---

    def show(self, state: WholeState) -> None:
        self._optimizer("a dying gasp").show(state)

    def leave_to_save_rank(self) -> None:
        self._optimizer("a dying gasp").leave_to_save_rank()

    def part_tensors(self) -> Mapping[str, tuple[int, ...]]:
        return self._optimizer("a dying gasp").part_tensors()


def _checkpoint_before(step: int) -> str:
    """Name a checkpoint of `step` or before: they are the trainer's, and in its form."""
    return f"the trainer's newest checkpoint of step {step} or before" if step else ""


def check_data_ranks(dp_ranks: Sequence[int], place: ModelParallel) -> None:
    """Raise ConfigError where the declared data-parallel group is not the trainer's."""
    if sorted(dp_ranks) != sorted(place.data_ranks):
        raise ConfigError(
            f"invalid data-parallel group: got ranks {list(dp_ranks)}, expected {place.data_ranks} as parallel_state reports. Where the"
            " model is split, initialize a module named parallel_state (Megatron's), or pass yours to"
            " ttp.mindio.modellink.set_parallel_state"
        )


def make_groups(ranks: Sequence[int]) -> ReplicaGroups | None:
    """Make the process groups for one data-parallel group (all ranks of the job call, for every group in the same order)."""
    rank, world_size = world()
    hosts = [""] * world_size
    dist.all_gather_object(hosts, host_name())
    rows = [range(len(ranks))] if len(ranks) % 2 else grid(len(ranks), 2, [hosts[member] for member in ranks])
    mine = None
    for row in rows:  # the optimizer's own: ranks of one row hold every shard once
        part = [ranks[place] for place in row]
        group = dist.new_group(part)
        if rank in part:
            mine = group
    return None if rank not in ranks else ReplicaGroups(tuple(ranks), mine)


def _port(ip: str, port: int) -> int:
    if not ip or type(port) is not int or not 1024 <= port <= 65535:
        raise ConfigError(
            f"controller: got address {ip!r}, port {port!r}, expected an address, and a port from 1024 to 65535"
        )
    return port


def _mode(local_copy: bool) -> str:
    if local_copy:
        return "local copy: every rank keeps the state of the step before as well (--local-copy-os)"
    return (
        "barrier: the optimizer's own all-reduce of norm and overflow over all ranks is the barrier before every update;"
        " torch.distributed.barrier() in the trainer is not needed"
    )
