"""Forward and backward of a step's micro-batches, on a rank that has the whole model or a part of it.

Owns what runs between `zero_grad` and `step`: the micro-batches of this rank's data, the pipeline's schedule, and the loss.
Leaves accumulated gradients in the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import loss_parallel

import ttp

from ..config.schema import Config
from ..data.batches import Samples, micro_batch_starts
from ..devices.binding import seed_all
from ..model.experts import Experts
from ..model.gpt import DTYPES, UNCOUNTED, Transformer, name_seed, token_loss
from .mesh import Mesh
from .pipeline_stages import embedding_ranks
from .tensor import divides_logits, whole_loss


class Passes:
    """One rank's passes. `chunks`: the model's parts on this rank, in the order of their layers."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        chunks: list[Transformer],
        optimizer: ttp.TTPReplicaOptimizer,
        sequences: Samples,
        device: torch.device,
    ) -> None:
        self.config, self.mesh, self.chunks = config, mesh, chunks
        self.optimizer, self.sequences, self.device = optimizer, sequences, device
        self._reduction = "sum" if sequences.padded else config.training_config.loss_reduction
        self._losses: list[torch.Tensor] = []
        """Of this step's micro-batches, as far as this rank computes them."""
        self._schedule = self._build_schedule() if mesh.pipeline.size > 1 else None
        self._evaluating: Any = None
        """The schedule of evaluations, which have no backward; made when the first one comes."""
        self._tied = self._tied_group()

    def renew(self, mesh: Mesh, successor: Callable[[Any], Any]) -> None:
        """Work over the process groups that have taken the place of the earlier ones: those of `mesh`."""
        self.mesh, self._tied = mesh, successor(self._tied)
        self._schedule = self._build_schedule() if mesh.pipeline.size > 1 else None
        self._evaluating = None
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, Experts):
                    module.group = successor(module.group)

    def run(self, step: int, consumed: int) -> float:
        """Do forward and backward of this rank's micro-batches; return the sum of their losses on the one rank of each
        data-parallel place that speaks for it, and 0 on the others that share the model."""
        self._losses.clear()
        self._weigh_balance()
        if self.sequences.padded and self.config.training_config.loss_reduction == "mean":
            self.optimizer.gradient_divisor = self.loss_divisor(consumed)
        with self._splitting_the_vocabulary():
            if self._schedule is None:
                self._accumulate(step, consumed)
            else:
                self._pipeline(step, consumed)
        self._sum_tied_gradients()
        if not self.mesh.tensor.is_first:
            return 0.0
        return sum(loss.item() for loss in self._losses)  # at the end: an accelerator is not made to wait in between

    @torch.no_grad()
    def evaluate(self, held_out: Samples, first: int, stop: int) -> float:
        """Return the sum over tokens of their losses, as `run` does, for a step's number of held-out sequences from position `first`
        on; those from `stop` on fill the batch and do not count. Leaves weights, gradients and random numbers as they are."""
        self._losses.clear()
        if self._schedule is not None and self._evaluating is None:
            self._evaluating = self._build_schedule()
        batches = (self._held_out_batch(held_out, start, stop) for start in self._starts(first))
        with self._as_for_evaluation(), self._splitting_the_vocabulary(), self._autocast():
            if self._evaluating is not None:
                tokens_BT, targets_BT = _joined(batches)
                inputs = (tokens_BT,) if self.chunks[0].stage.begins else ()
                target = targets_BT if self.chunks[-1].stage.ends else None
                beside = self.chunks[0].beside(tokens_BT, targets_BT)
                self._evaluating.eval(*inputs, target=target, losses=None if target is None else [], **beside)
            else:
                for tokens_BT, targets_BT in batches:
                    self._loss(self.chunks[0](tokens_BT, **self.chunks[0].beside(tokens_BT, targets_BT)), targets_BT)
        return sum(loss.item() for loss in self._losses) if self.mesh.tensor.is_first else 0.0

    @contextlib.contextmanager
    def _as_for_evaluation(self) -> Iterator[None]:
        """Sum the losses, without dropout, within this block; it may end by an exception, and training may continue after it."""
        trained, self._reduction = self._reduction, "sum"
        for chunk in self.chunks:
            chunk.eval()
        try:
            yield
        finally:
            self._reduction = trained
            for chunk in self.chunks:
                chunk.train()

    # --- the whole model, or a tensor-parallel slice ---

    def _accumulate(self, step: int, consumed: int) -> None:
        starts = self._starts(consumed)
        for first in starts:
            self._seed(step, first)
            tokens_BT, targets_BT = self._batch(self.sequences, first)
            hold = contextlib.nullcontext() if first == starts[-1] else self.optimizer.no_sync()
            with hold:
                with self._autocast():
                    logits_BTV = self.chunks[0](tokens_BT, **self.chunks[0].beside(tokens_BT, targets_BT))
                torch.autograd.backward(self._loss(logits_BTV, targets_BT))

    # --- a pipeline ---

    def _build_schedule(self) -> Any:
        stages: list[Any] = [self._stage(chunk, number) for number, chunk in enumerate(self.chunks)]
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        count = self.config.dataset_config.micro_batch_num
        if len(stages) == 1:
            return Schedule1F1B(stages[0], count, **options)
        return ScheduleInterleaved1F1B(stages, count, **options)

    def _stage(self, chunk: Transformer, number: int) -> PipelineStage:
        """Chunk `number` of a rank is stage number x ranks + rank: shapes are known, so that none need be sent."""
        model, pipeline = self.config.model_config, self.mesh.pipeline
        count = len(self.chunks) * pipeline.size
        batch = self.config.dataset_config.batch_size
        # Autocast shortens matrix products; the stream between blocks keeps the parameters' type.
        stream, products = DTYPES[model.params_dtype], DTYPES[model.compute_dtype]

        def between(cut: int) -> tuple[torch.Tensor, ...]:
            shapes = chunk.passed_on(cut, batch)
            return tuple(torch.empty(shape, dtype=stream, device="meta", requires_grad=True) for shape in shapes)

        taken, given = between(chunk.stage.first_layer), between(chunk.stage.stop_layer)
        if chunk.stage.begins:
            taken = (torch.empty(batch, chunk.input_length, dtype=torch.int64, device="meta"),)
        if chunk.stage.ends:
            logits = (batch, model.seq_length, model.vocab_size)
            given = (torch.empty(logits, dtype=products, device="meta", requires_grad=True),)
        stage = _Stage(
            chunk, number * pipeline.size + pipeline.rank, count, self.device, taken, given, group=pipeline.group
        )
        stage.optimizer = self.optimizer
        return stage

    def _pipeline(self, step: int, consumed: int) -> None:
        self._seed(step, self._starts(consumed)[0])
        tokens_BT, targets_BT = _joined(self._batch(self.sequences, first) for first in self._starts(consumed))
        inputs = (tokens_BT,) if self.chunks[0].stage.begins else ()
        target = targets_BT if self.chunks[-1].stage.ends else None
        with self._autocast():
            assert self._schedule is not None
            losses: list[torch.Tensor] | None = None if target is None else []
            beside = self.chunks[0].beside(tokens_BT, targets_BT)
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **beside)

    def _tied_group(self) -> Any:
        """Return a process group of the stages that have the tied embedding matrix (all ranks call)."""
        model, pipeline = self.config.model_config, self.mesh.pipeline
        if model.untie_embeddings_and_output_weights or pipeline.size == 1:
            return None
        ranks = dist.get_process_group_ranks(pipeline.group)
        having = [ranks[place] for place in embedding_ranks(self.config)]
        return dist.new_group(having, use_local_synchronization=True) if dist.get_rank() in having else None

    def _sum_tied_gradients(self) -> None:
        if self._tied is not None:
            dist.all_reduce(self.optimizer.gradient("embedding.weight"), group=self._tied)

    # --- what both share ---

    def _starts(self, consumed: int) -> list[int]:
        data = self.config.dataset_config
        return list(
            micro_batch_starts(
                consumed,
                batch_size=data.batch_size,
                micro_batch_num=data.micro_batch_num,
                dp_rank=self.mesh.data.rank,
                dp_size=self.mesh.data.size,
            )
        )

    def loss_divisor(self, consumed: int) -> int:
        """Return what the sum over ranks and micro-batches of the reduced losses is divided by, to give the mean of a token, in the step
        that begins at `consumed`."""
        if self._reduction == "mean":
            return self.mesh.data.size * self.config.dataset_config.micro_batch_num
        return self.sequences.counted(consumed, self.config.batch_size(self.mesh.data.size))

    def _batch(self, sequences: Samples, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_BT, targets_BT = sequences.batch(first, self.config.dataset_config.batch_size)
        return tokens_BT.to(self.device), targets_BT.to(self.device)

    def _held_out_batch(self, held_out: Samples, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_BT, targets_BT = self._batch(held_out, first)
        targets_BT = targets_BT.clone()  # one sequence's inputs are in the same memory
        targets_BT[max(0, stop - first) :] = UNCOUNTED
        return tokens_BT, targets_BT

    def _seed(self, step: int, first: int) -> None:
        """Randomness belongs to the step and its data, not to the process: a restart draws the same. Ranks that work on parts
        of the same sequences draw apart; those that do the same work draw the same."""
        names: list[object] = ["dropout", step, first]
        if self.mesh.pipeline.size > 1:
            names.append(f"stage {self.mesh.pipeline.rank}")
        if self.chunks[0].sequence_ranks > 1:
            names.append(f"slice {self.mesh.tensor.rank}")
        seed_all(name_seed(self.config.training_config.seed, *names))

    def _loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Note the loss and return what backward starts from."""
        with torch.autocast(self.device.type, enabled=False):
            in_float16 = self.config.model_config.fp16_lm_cross_entropy
            loss = whole_loss(token_loss(logits_BTV, targets_BT, self._reduction, in_float16=in_float16))
        self._losses.append(loss.detach())
        return self.optimizer.scale_loss(loss)

    def _weigh_balance(self) -> None:
        """The experts' balance loss has the weight in this step's gradient that the loss of a micro-batch has."""
        weight = self.optimizer.loss_scale
        if self.config.training_config.loss_reduction == "sum":
            weight *= self.config.dataset_config.batch_size * self.config.model_config.seq_length
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, Experts):
                    module.aux_weight = weight

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        model = self.config.model_config
        if model.compute_dtype == model.params_dtype:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[model.compute_dtype])

    @contextlib.contextmanager
    def _splitting_the_vocabulary(self) -> Iterator[None]:
        """Where each tensor-parallel rank has some of the logits, their cross entropy needs a few sums only."""
        if self.mesh.tensor.size == 1 or not divides_logits(self.config):
            yield
            return
        with loss_parallel():
            yield


class _Stage(PipelineStage):
    """A stage whose gradients are reduced when those of all micro-batches are in, or after each where they accumulate in shards."""

    optimizer: ttp.TTPReplicaOptimizer

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.optimizer.micro_batch(self.submod.parameters()):
            return super().backward_one_chunk(*args, **kwargs)


def _joined(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return micro-batches one after the other."""
    parts = list(batches)
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([targets for _, targets in parts])
