"""The bundled trainer under any layout, on real gloo ranks: what a test trains, and what came of it.

One world of ranks does many trainings one after the other; a training that needs fewer ranks leaves the last ones out.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from tests.unit.trainer.conftest import SMALL
from tests.unit.trainer.pairs import with_encoder_decoder
from ttp.checkpoint.format.tiling import boxes_of
from ttp.checkpoint.format.types import HeldTensor
from ttp.optim.shard_layout.split import block_of, local_of
from ttp.trainer import train
from ttp.trainer.config.loader import load_config
from ttp.trainer.config.schema import Config
from ttp.trainer.data.batches import OpenedText, open_sequences
from ttp.trainer.metrics import account, read_lines
from ttp.trainer.model.gpt import Transformer
from ttp.trainer.world import World


@dataclass(frozen=True)
class Axes:
    """A layout. `experts`: of each layer; `expert`: ranks that they are divided over."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    sequence: bool = False
    experts: int = 0
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def keys(self) -> dict[str, Any]:
        at = "parallel_config."
        given: dict[str, Any] = {
            f"{at}tensor_model_parallel_size": self.tensor,
            f"{at}pipeline_model_parallel_size": self.pipeline,
        }
        if self.experts:
            given |= {"model_config.num_experts": self.experts, f"{at}expert_model_parallel_size": self.expert}
        if self.virtual:
            given[f"{at}virtual_pipeline_model_parallel_size"] = self.virtual
        return {**given, f"{at}sequence_parallel": "true"} if self.sequence else given

    def __str__(self) -> str:
        text = f"dp{self.data}tp{self.tensor}pp{self.pipeline}"
        text += (f"v{self.virtual}" if self.virtual else "") + ("sp" if self.sequence else "")
        return text + (f"ep{self.expert}of{self.experts}" if self.experts else "")


@dataclass(frozen=True)
class Training:
    """One run of the small model: the same `sequences` a step in every layout, in micro-batches of the same size on every rank."""

    name: str
    axes: Axes
    keys: Mapping[str, Any] = field(default_factory=dict)
    sequences: int = 12
    micro_batches: int = 2
    """Of a data-parallel rank."""
    overflow: tuple[int, int] | None = None
    """(rank, step): the gradient of that rank's last parameter is infinite in that step."""
    keep_state: bool = False
    """Put masters and moments of all ranks together at the end, for `Result.state`."""
    encoder_decoder: Mapping[str, Any] | None = None
    """Keys of an encoder-decoder, which is trained on pairs in the place of the GPT; None: the GPT."""
    keep_positions: bool = False
    """Note which sequences every rank takes in which step, for `Result.positions`."""

    @property
    def arguments(self) -> list[tuple[str, str]]:
        per_rank, rest = divmod(self.sequences, self.axes.data)
        batch, more = divmod(per_rank, self.micro_batches)
        assert not rest and not more, f"{self.name}: {self.sequences} sequences cannot be shared"
        keys = {
            **SMALL,
            "model_config.num_layers": 4,
            **self.axes.keys,
            "dataset_config.batch_size": batch,
            "dataset_config.micro_batch_num": self.micro_batches,
            **self.keys,
        }
        return [(key, "null" if value is None else str(value)) for key, value in keys.items()]


@dataclass(frozen=True)
class Result:
    """What a training left in its folder."""

    folder: Path

    @property
    def lines(self) -> dict[int, Mapping[str, Any]]:
        return account(read_lines(self.folder / "metrics.jsonl"))

    @property
    def bits(self) -> dict[int, tuple[str, str]]:
        """Loss and norm of each step."""
        return {step: (line["loss"], line["grad_norm"]) for step, line in self.lines.items()}

    @property
    def weights(self) -> str:
        final: dict[str, Any] = json.loads((self.folder / "final.json").read_text())
        return str(final["weights_sha256"])

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Whole masters and moments by the checkpoint's keys."""
        state: dict[str, torch.Tensor] = torch.load(self.folder / "state.pt")
        return state

    @property
    def positions(self) -> dict[int, list[int]]:
        """The positions in the data that all ranks together took in each step, in order."""
        taken: dict[int, list[int]] = {}
        for path in self.folder.glob("taken_*"):
            for line in path.read_text().splitlines():
                step, first, size = map(int, line.split())
                taken[step] = sorted([*taken.get(step, []), *range(first, first + size)])
        return taken

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"iter_{step:07d}"


class _Watched(train.Trainer):
    """The trainer, with what the test asks for."""

    training: Training

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        logging.getLogger("ttp").propagate = False
        if self.training.overflow is not None and self.training.overflow[0] == self.world.rank:
            last = list(self.chunks[-1].parameters())[-1]
            last.register_hook(self._overflow)  # type: ignore[no-untyped-call]
        if self.training.keep_positions:
            self._batch = self.sequences.batch
            self.sequences.batch = self._note_batch  # type: ignore[method-assign]

    def _note_batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        with open(self.output_dir / f"taken_{self.world.rank}", "a") as notes:
            notes.write(f"{self.step + 1} {first} {size}\n")
        return self._batch(first, size)

    def _overflow(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self.training.overflow is not None
        return gradient * (float("inf") if self.step + 1 == self.training.overflow[1] else 1.0)

    def close(self) -> None:
        assert_copies_agree(self.chunks, self.world.size)
        if self.training.keep_state:
            held = [tensor for tensors in self.optimizer.holdings().values() for tensor in tensors]
            whole = put_together(held, self.world.size)
            if self.world.rank == 0:
                torch.save(whole, self.output_dir / "state.pt")
        super().close()


def assert_copies_agree(chunks: Sequence[Transformer], world: int) -> None:
    """Every rank that has a parameter, or the same part of it, has the same bits (all ranks)."""
    mine = []
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        offsets = block_of(parameter)[1] if isinstance(parameter, DTensor) else (0,) * parameter.dim()
        content = local_of(parameter).contiguous().view(torch.uint8).numpy().tobytes()
        mine.append((name, offsets, hashlib.sha256(content).hexdigest()))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    known: dict[Any, str] = {}
    for rank, reported in enumerate(everyone):
        for name, offsets, digest in reported:
            assert known.setdefault((name, offsets), digest) == digest, (
                f"rank {rank} has other bits of {name} {offsets}"
            )


def put_together(mine: list[HeldTensor], world: int) -> dict[str, torch.Tensor]:
    """Return the whole tensors of which each rank holds parts (all ranks). Replicas must have the same bits, and no element be
    missing."""
    pieces = [
        (
            held.key,
            tuple(held.shape),
            box.offsets,
            box.sizes,
            held.values[box.start - held.start :][: box.numel].clone(),
        )
        for held in mine
        for box in boxes_of(held)
    ]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, pieces)
    whole: dict[str, torch.Tensor] = {}
    there: dict[str, torch.Tensor] = {}
    for key, shape, offsets, sizes, values in (piece for reported in everyone for piece in reported):
        into = whole.setdefault(key, torch.zeros(shape, dtype=values.dtype))
        known = there.setdefault(key, torch.zeros(shape, dtype=torch.bool))
        where = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        part = values.view(sizes)
        assert bool((~known[where] | (into[where] == part)).all()), f"replicas of {key} differ"
        into[where], known[where] = part, True
    assert all(bool(known.all()) for known in there.values()), "elements that no rank holds"
    return whole


def read_by_torch(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, whole, as torch alone reads them."""
    found = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


LAST = 6
"""The last step of a training."""
SAVE: dict[str, Any] = {"training_config.save_interval": LAST}


def loaded(name: str, checkpoint: Path, axes: Axes, keys: Mapping[str, Any] | None = None) -> Training:
    """Return a training that loads a checkpoint, of whatever step, and does nothing more."""
    step = int(checkpoint.name.removeprefix("iter_"))
    there = {"training_config.resume": checkpoint, "training_config.training_iters": step}
    return Training(name, axes, {**(keys or {}), **there}, sequences=24, keep_state=True)


ROUNDED_APART = 4.0
"""A norm may be so many times as far away as that of one process which only sums in another order."""


def apart(ours: Result, theirs: Result, name: str, step: int) -> float:
    """How far two values of one step are apart, relative to their size."""
    return abs(float(ours.lines[step][name]) / float(theirs.lines[step][name]) - 1)


def assert_same_curve(
    ours: Result,
    theirs: Result,
    loss: float = 1e-6,
    norm: float = 1e-5,
    until: int | None = None,
    reordered: Sequence[Result] = (),
    outliers: int = 0,
) -> None:
    """The same losses and norms to FP32 round-off, relative to their size; of steps up to `until`.

    `reordered`: trainings that differ from `theirs` in the order of their sums alone: they tell in which steps a norm hangs on
    the last bits. `outliers`: how many such steps there may be where no such trainings are to be had.
    """
    assert ours.lines.keys() == theirs.lines.keys() and ours.lines
    far = []
    for step in range(1, (until or max(ours.lines)) + 1):
        away = apart(ours, theirs, "loss_value", step)
        assert away <= loss, f"{ours.folder.name}, step {step}: the loss is {away:.1e} away"
        within = max(
            norm, *(ROUNDED_APART * apart(one, theirs, "grad_norm_value", step) for one in (*reordered, theirs))
        )
        if (away := apart(ours, theirs, "grad_norm_value", step)) > within:
            far.append(f"{ours.folder.name}, step {step}: the norm is {away:.1e} away, expected {within:.1e}")
            assert away <= 1e-3, far[-1]
    assert len(far) <= outliers, far


def assert_same_bits(ours: Result, theirs: Result) -> None:
    """Losses, norms and final weights."""
    assert ours.bits == theirs.bits and ours.weights == theirs.weights and ours.bits, (ours.folder, theirs.folder)


def assert_state_of(result: Result, checkpoint: Path) -> None:
    """Masters and optimizer state of all ranks together have the bits that torch alone reads in the checkpoint."""
    expected, found = read_by_torch(checkpoint), result.state
    assert found.keys() == expected.keys() and any(key.endswith(("exp_avg_sq", "momentum_buffer")) for key in found)
    for key, value in expected.items():
        assert torch.equal(found[key], value), (result.folder, key)


OVERFLOW = 3
_SCALED = {"training_config.loss_scale": 1024, "training_config.loss_scale_window": 3}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"model_config.params_dtype": "bfloat16", "model_config.compute_dtype": "bfloat16"},
    "bf16 by autocast": {"model_config.compute_dtype": "bfloat16"},
    "fp16": {"model_config.params_dtype": "float16", "model_config.compute_dtype": "float16", **_SCALED},
    "fp16 by autocast": {"model_config.compute_dtype": "float16", **_SCALED},
}


def in_precision(precision: str, axes: Axes) -> Training:
    """Return a training in a precision; where it has a loss scale, the last rank's gradient overflows in step OVERFLOW."""
    keys = PRECISIONS[precision]
    overflow = (axes.ranks - 1, OVERFLOW) if "training_config.loss_scale" in keys else None
    return Training(f"{precision} {axes}", axes, keys, overflow=overflow, keep_state=True)


def assert_trains_in_precision(result: Result, training: Training, whole: Result) -> None:
    """As FP32 does, to the type's own precision. With a loss scale one rank's overflow skips the step on all, whichever axis it is
    on, and halves the scale. The state is FP32."""
    lines, others = result.lines, whole.lines
    skipped = [step for step, line in lines.items() if line["skipped"]]
    assert skipped == ([] if training.overflow is None else [OVERFLOW])
    for step in range(1, OVERFLOW):
        assert abs(lines[step]["loss_value"] / others[step]["loss_value"] - 1) < 1e-2, (training.name, step)
        assert abs(lines[step]["grad_norm_value"] / others[step]["grad_norm_value"] - 1) < 5e-2, (training.name, step)
    assert lines[LAST]["loss_value"] < lines[1]["loss_value"]
    if training.overflow is not None:
        assert [lines[step]["loss_scale"] for step in sorted(lines)] == [1024, 1024, 1024, 512, 512, 512]
        assert lines[OVERFLOW]["grad_norm"] == "inf"
    assert all(value.dtype == torch.float32 for value in result.state.values())


def rank_main(rank: int, ports: list[int], trainings: tuple[Training, ...], folder: str, deadline_s: float) -> None:
    """One rank of the world: do the trainings in order; leave `done_<rank>` or `error_<rank>`, and stacks if it takes too long."""
    name = "starting"
    stacks = open(Path(folder, f"stacks_{rank}"), "w")  # noqa: SIM115  # as long as the process lives
    faulthandler.dump_traceback_later(deadline_s, file=stacks)
    try:
        for number, training in enumerate(trainings):
            if rank >= training.axes.ranks:
                continue
            name = training.name
            os.environ.update(
                ENABLE_TTP="False", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[number]), RANK=str(rank),
                LOCAL_RANK=str(rank), WORLD_SIZE=str(training.axes.ranks), TORCHELASTIC_USE_AGENT_STORE="True",
            )  # fmt: skip
            output = [("training_config.output_dir", str(Path(folder, name)))]
            config = load_config("gpt_tiny", [*training.arguments, *output])
            _Watched.training = training
            train.Trainer = _Watched  # type: ignore[misc]
            opened: Callable[[Config], OpenedText[Any]] = open_sequences
            if training.encoder_decoder is not None:
                config, opened = with_encoder_decoder(config, training.encoder_decoder)
            with train.started(config, World(rank, training.axes.ranks, rank, launched=True), opened) as trainer:
                trainer.train()
                trainer.close()
        Path(folder, f"done_{rank}").touch()
    except BaseException:
        Path(folder, f"error_{rank}").write_text(f"rank {rank}, {name}:\n{traceback.format_exc()}")
        os._exit(1)  # peers wait in a collective; nothing here may wait for them
