"""The training loop, and how a run is put together from the configuration.

Owns the order of things within a step. Uses nothing of ttp but what `import ttp` gives, so that any other trainer can do the
same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ttp
from ttp.curves.board import open_board, prepare
from ttp.errors import CheckpointError
from ttp.inputs import checked

from .config.encoder_decoder_config import EncoderDecoderConfig
from .config.schema import Config, ParallelConfig, plain
from .data.batches import OpenedText, Samples, open_sequences
from .devices.binding import bind, bind_shared, choose_device, make_deterministic
from .evaluation import Evaluation
from .logs import RunLog, open_logs
from .metrics import MetricsFile, StepMetrics
from .model.encoder_decoder import count_parameters as count_encoder_decoder
from .model.gpt import count_parameters
from .parallel.mesh import Mesh, build_mesh
from .parallel.micro_batches import Passes
from .parallel.optimizer import build_optimizer
from .parallel.pipeline_stages import build_chunks, check_stages, hash_weights
from .parallel.tensor import check_divides
from .schedule import learning_rate
from .world import World, check_agreement, joined

log = logging.getLogger("ttp.trainer")


_NOTED_OTHERWISE = ". The same text causes this once where the checkpoint's was noted otherwise: by an earlier version, or prepared in another way"

OnStep = Callable[[StepMetrics], None]


def run(config: Config, world: World) -> None:
    """Train as configured: from nothing, or from where the newest checkpoint stands (every rank calls)."""
    with started(config, world) as trainer:
        trainer.train()
        trainer.close()


@contextmanager
def started(
    config: Config,
    world: World,
    open_text: Callable[[Config], OpenedText[Any]] = open_sequences,
    on_step: OnStep = lambda metrics: None,
) -> Iterator[Trainer]:
    """Give a trainer that has resumed, of what `open_text` opens (every rank calls). `on_step`: called on every rank after each step."""
    dp = config.parallel_config.data_parallel_size(world.size)  # refuses a world that is not the product of the axes
    config.parallel_config.replicas(dp, config.training_config.use_distributed_optimizer)
    check_divides(config)
    check_stages(config)
    prepare(config.training_config.tensorboard, world.rank, "training_config.tensorboard")
    output_dir = Path(config.training_config.output_dir).resolve()
    with open_logs(output_dir, world.rank) as run_log, run_log.errors(world.rank):
        text = open_text(config)
        fingerprint = text.tokens.fingerprint()  # before ranks wait for each other: it reads the text
        kind = choose_device(config.training_config.device)
        shared = config.training_config.shared_device
        device = bind_shared(kind, world.rank) if shared else bind(kind, world.local_rank)
        if config.training_config.cpu_threads is not None:
            torch.set_num_threads(config.training_config.cpu_threads)
        if config.training_config.deterministic:
            make_deterministic()
        with joined(world, kind, device):
            check_agreement("configuration", json.dumps(plain(config), sort_keys=True), device)
            check_agreement("text", f"{text.tokens.size} {fingerprint}", device)
            mesh = build_mesh(config.parallel_config, world.size, world.rank, kind.name)
            log.info("%s", layout_line(config.parallel_config, mesh.data.size))
            yield Trainer(config, world, mesh, device, text, fingerprint, run_log, output_dir, on_step)


def layout_line(parallel: ParallelConfig, data_parallel_size: int) -> str:
    """Return the sizes of the axes for the log, in the form that MindFormers' users search for."""
    return (
        f"dp {data_parallel_size} | pp {parallel.pipeline_model_parallel_size} | tp {parallel.tensor_model_parallel_size} |"
        f" sp {parallel.sequence_parallel} | vpp {parallel.virtual_pipeline_model_parallel_size}"
    )


class Trainer:
    """One rank's part of a run. Building it resumes the run; `train` does the remaining steps; `close` ends it."""

    def __init__(
        self,
        config: Config,
        world: World,
        mesh: Mesh,
        device: torch.device,
        text: OpenedText[Any],
        fingerprint: str,
        run_log: RunLog,
        output_dir: Path,
        on_step: OnStep,
    ) -> None:
        self.config = config
        self.world = world
        self.mesh = mesh
        self.device = device
        self.sequences: Samples = text.training
        self.run_log = run_log
        self.output_dir = output_dir
        self._on_step = on_step
        self.samples_per_step = config.batch_size(mesh.data.size)
        self.order = {
            "text": fingerprint,
            "seq_length": config.model_config.seq_length,
            "seed": config.training_config.seed,
            "shuffle": config.dataset_config.shuffle,
            "validation_share": config.dataset_config.validation_share,
        }
        """All that decides which text a position stands for."""
        self.configuration = hashlib.sha256(json.dumps(plain(config), sort_keys=True).encode()).hexdigest()
        self.metrics = MetricsFile(output_dir / "metrics.jsonl") if world.rank == 0 else None
        replicas = config.parallel_config.replicas(mesh.data.size, config.training_config.use_distributed_optimizer)
        self.chunks = build_chunks(config, mesh, device)
        self.optimizer = build_optimizer(config, self.chunks, mesh, replicas)
        self.passes = Passes(config, mesh, self.chunks, self.optimizer, text.training, device)
        self.evaluation = Evaluation(config, mesh, self.passes, text, output_dir, world.rank, device)
        save_dirs = config.training_config.save_dirs or (str(output_dir / "checkpoints"),)
        layout = {**mesh.sizes, "model_config": plain(config.model_config), "tokenizer": text.tokenizer}
        self.session = ttp.start(
            self.optimizer,
            save_dirs=save_dirs,
            layout=layout,
            log_dir=output_dir / "log",
            keep_checkpoint_max=config.training_config.keep_checkpoint_max,
            copies=ttp.CopyOptions(config.training_config.copies),
            in_place="unrehearsed",  # the tests do
        )
        self.session.regrouping.on_regroup(self._renew_groups)
        self._describe(text, replicas)
        self.step, self.consumed = self._resume()
        self.board = open_board(config.training_config.tensorboard, self.step) if world.rank == 0 else None

    # --- start ---

    def _describe(self, text: OpenedText[Any], replicas: int) -> None:
        if self.world.rank != 0:
            return
        model = self.config.model_config
        parameters = (
            count_encoder_decoder(model) if isinstance(model, EncoderDecoderConfig) else count_parameters(model)
        )
        log.info(
            "model: %s parameters, %d layers, hidden %d, %s, compute in %s",
            f"{parameters:,}",
            model.num_layers,
            model.hidden_size,
            model.params_dtype,
            model.compute_dtype,
        )
        log.info(
            "text: %s, %s tokens, %s sequences of %d tokens (%s held out); a step takes %d sequences",
            text.tokens.name,
            f"{text.tokens.size:,}",
            f"{self.sequences.count:,}",
            model.seq_length,
            f"{text.held_out.count:,}" if text.held_out is not None else "none",
            self.samples_per_step,
        )
        interval = self.config.training_config.save_interval
        log.info(
            "checkpoints: %s",
            "at faults, and the last step"
            if interval is None
            else f"every {interval} steps, at faults, and the last step",
        )
        if replicas == 1:
            reason = "a lone rank" if self.world.size == 1 else "no rank has what another holds"
        elif self.mesh.data.size == self.config.parallel_config.expert_model_parallel_size:
            reason = "of experts 1"
        else:
            reason = ""
        single = f" ({reason}: a death costs the steps since the last checkpoint)" if reason else ""
        axes = " x ".join(
            f"{name.removesuffix('_size').replace('_', ' ')} {size}" for name, size in self.mesh.sizes.items()
        )
        how = f"{axes} on" if self.mesh.splits_model else "data parallel on"
        log.info("ranks: %d, %s %s; optimizer replicas: %d%s", self.world.size, how, self.device.type, replicas, single)
        if self.config.training_config.gradient_accumulation_shard:
            if self.optimizer.layout.shards == 1:
                log.info("gradient_accumulation_shard has no effect: every data-parallel rank holds all shards")
            elif self.config.dataset_config.micro_batch_num == 1:
                log.info("gradient_accumulation_shard: with one micro-batch a step it saves memory and no more is sent")

    def _check_same(self, changed: Sequence[str], state: Mapping[str, Any]) -> None:
        """This process is in a lost one's place: raise NotAsBefore where it would train otherwise than the others."""
        differing = [*changed, *(["configuration"] if state.get("configuration") != self.configuration else [])]
        if differing:
            raise ttp.errors.NotAsBefore(
                f"this process takes a lost one's place, and its {', '.join(differing)} differ from the job's: a file was changed since the job began,"
                " or is another one on this node. Give all nodes the same; a restart takes what is there then"
            )

    def _resume(self) -> tuple[int, int]:
        """Load the chosen checkpoint, if any; return (steps done, sequences consumed)."""
        configured = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        point = self.session.resume(self.config.training_config.resume, check=check_state)
        for group, settings in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(settings)  # what the configuration says now goes before what the checkpoint remembers
        facts = {"unix_s": time.time(), "world_size": self.world.size, "seed": self.config.training_config.seed}
        if point is None:
            if self.metrics is not None:
                self.metrics.append({"event": "start", "from_step": 0, **facts})
            return 0, 0
        state = point.state
        lacking = [name for name in ("consumed_samples", "epoch", "loss_divisor", "order") if name not in state]
        if lacking:
            raise ttp.errors.CheckpointMismatch(
                f"{point.path}: its trainer state has no {', '.join(lacking)}: it was not written by this trainer;"
                " resume from another checkpoint, or use resume: never and an empty output_dir"
            )
        changed = changed_order(state["order"], self.order)
        if not point.path:
            self._check_same(changed, state)
        if changed and self.world.rank == 0:
            log.warning(
                "%s differs from the checkpoint's; the data, or their order, will not match the original run%s",
                ", ".join(changed),
                _NOTED_OTHERWISE if "text" in changed else "",
            )
        if self.metrics is not None:
            recovered = _recovered_line(point.record, state)
            filled = self.metrics.resumed(
                point.step, {"path": point.path, "skipped": list(point.skipped), **facts}, recovered
            )
            if filled:
                log.info("step %d was committed, but its line was lost: recovered from the checkpoint", point.step)
        return point.step, int(state["consumed_samples"])

    # --- the loop ---

    def _renew_groups(self, successor: Callable[[Any], Any]) -> None:
        self.mesh = self.mesh.renewed(successor)
        self.passes.renew(self.mesh, successor)

    @ttp.ttp_to_persist
    def train(self) -> None:
        """Do the steps that remain (all ranks). Raises whatever ends the training early, after TTP is done with it."""
        last = self.config.training_config.training_iters
        self._catch_up()
        with self.run_log.progress(last, self.step):
            if self.step >= last and self.world.rank == 0:
                log.info("nothing to do: %d of %d steps are done", self.step, last)
            if self.step:  # an earlier process, or this one, may not have come to these
                self._save_if_due()
                self._evaluate()
            while self.step < last:
                self._do_step()
                self._save_if_due()
                self._evaluate()
            self._finish()

    def _catch_up(self) -> None:
        """Begin where the session is: training may have been left in the middle of a step, which another thread then finished."""
        step, record = self.optimizer.current_step, self.optimizer.last_record
        if step == self.step:
            return
        state = self.session.step_state()
        if self.metrics is not None and record is not None and (line := _recovered_line(record, state)):
            self.metrics.append(line)
        self.step, self.consumed = step, int(state["consumed_samples"])

    def _evaluate(self) -> None:
        """Measure the loss on held-out text, where this step is one of those that do."""
        if self.evaluation.is_due(self.step):
            with self.session.pause():
                self.evaluation.run(self.step)

    def _do_step(self) -> None:
        began = time.perf_counter()
        step, config = self.step + 1, self.config.training_config
        rate = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.passes.run(step, self.consumed)
        divisor = self.passes.loss_divisor(self.consumed)
        tokens = self.sequences.counted(self.consumed, self.samples_per_step)
        epoch = self.sequences.epoch(self.consumed)
        consumed = self.consumed + self.samples_per_step
        state = {
            "consumed_samples": consumed,
            "epoch": epoch,
            "loss_divisor": divisor,
            "order": self.order,
            "configuration": self.configuration,
        }
        self.session.set_step_state(step, state)
        result = self.optimizer.step(sums=[loss])
        self.step, self.consumed = step, consumed
        metrics = StepMetrics(
            step=step,
            epoch=epoch,
            loss=result.sums[0] / divisor,
            grad_norm=result.grad_norm,
            learning_rates=(rate,) * len(self.optimizer.param_groups),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            tokens=tokens,
            time_s=time.perf_counter() - began,
            consumed_samples=consumed,
        )
        if self.metrics is not None:  # before anything that waits for another rank, whose death could lose the line
            self.metrics.append(metrics.line(unix_s=time.time()))
        if self.board is not None:
            self.board.step(metrics.points())
        if self.world.rank == 0:
            self.session.report_loss(metrics.loss)
        self._on_step(metrics)
        self.run_log.step(metrics, line=step == config.training_iters or step % config.log_interval == 0)

    def _save_if_due(self) -> None:
        """Write a checkpoint of this step if it is the last one, or one of those that are saved, and there is none: the last one always, so that a
        process that dies while all leave does not cost the steps before. A save during which a rank was lost is made again."""
        config = self.config.training_config
        periodic = config.save_interval is not None and self.step % config.save_interval == 0
        if (periodic or self.step == config.training_iters) and self.session.newest_saved < self.step:
            self._save(self.step, periodic)

    def _save(self, step: int, periodic: bool) -> None:
        """Write a checkpoint; a disk that refuses it does not end a healthy training."""
        try:
            path = self.session.save(step, periodic=periodic)
        except CheckpointError as exc:
            log.error("%s; training continues without this checkpoint", exc)
            return
        if self.world.rank == 0:
            log.info("step %d saved in %s", step, path)

    # --- end ---

    def _finish(self) -> None:
        """Leave the last step and a hash of the final weights in final.json (rank 0; all ranks call)."""
        weights = hash_weights(self.chunks, self.mesh)
        if self.world.rank != 0:
            return
        final = {"step": self.step, "consumed_samples": self.consumed, "weights_sha256": weights}
        path = self.output_dir / "final.json"
        unfinished = path.with_suffix(".json.tmp")
        unfinished.write_text(json.dumps(final) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
        log.info("done: %d steps, weights %s", self.step, final["weights_sha256"])

    def close(self) -> None:
        """End the session and the files."""
        self.session.close()
        self.evaluation.close()
        if self.metrics is not None:
            self.metrics.close()
        if self.board is not None:
            self.board.close()


def check_state(state: Mapping[str, Any]) -> None:
    """Judge what a checkpoint has of this trainer's own. Raises ValueError naming the key. One that is missing is another trainer's matter."""
    for name, least in (("consumed_samples", 0), ("epoch", 0), ("loss_divisor", 1)):
        if name in state:
            checked.integer(state[name], name, least)
    if "order" in state:
        checked.mapping(state["order"], "order")


def changed_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of what decides on the order of the text and is not as the checkpoint has it."""
    if not before:  # an imported model: no batch was taken yet
        return []
    before = {"validation_share": 0.0, **before}  # older checkpoints were written when nothing could be held out
    return [name for name, value in now.items() if before.get(name) != value]


def _recovered_line(record: Any, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the metrics line of a step from its commit record, if there is one."""
    if record is None or not record.sums:
        return None
    metrics = StepMetrics(
        step=record.step,
        epoch=int(state["epoch"]),
        loss=record.sums[0] / state["loss_divisor"],
        grad_norm=record.grad_norm,
        learning_rates=record.learning_rates,
        loss_scale=record.loss_scale,
        skipped=record.skipped,
        consumed_samples=int(state["consumed_samples"]),
    )
    return metrics.line(unix_s=time.time())
