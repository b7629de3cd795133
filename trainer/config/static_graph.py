"""Translates the YAML of MindFormers' static-graph trainer (GPT2-13B) to this trainer's sections (PURE).

Owns the sections `context`, `parallel`, `recompute_config` and the MindFormers keys of `parallel_config`: each key becomes one of ours, or is
refused with a reason, or has no effect here, which a note says. Never reads a file; the values that it sets are checked in `schema.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ttp.errors import ConfigError
from ttp.inputs import checked

from ..devices.device_table import MINDSPORE_NAMES

MODES = ("data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")
"""By their numbers 0 to 3."""
_SECTIONS = ("context", "parallel", "recompute_config")
"""Sections that no configuration of ours has."""
_PARALLEL = (
    "model_parallel", "pipeline_stage", "expert_parallel", "context_parallel", "optimizer_shard", "micro_batch_num", "use_seq_parallel",
    "vocab_emb_dp", "gradient_aggregation_group",
)  # fmt: skip
"""Keys of `parallel_config` that are not ours; `data_parallel` is both."""
_OTHER_SECTIONS = {
    "model": "model_config, or preset: gpt2_13b",
    "runner_config": "training_config.training_iters and dataset_config.batch_size",
    "optimizer": "optimizer_config",
    "lr_schedule": "optimizer_config.learning_rate_scheduler_kwargs",
    "train_dataset": "dataset_config",
    "train_dataset_task": "dataset_config",
    "eval_dataset": "dataset_config.validation_share and training_config.eval_interval",
    "eval_dataset_task": "dataset_config.validation_share and training_config.eval_interval",
    "processor": "dataset_config.tokenizer",
    "callbacks": "training_config.log_interval and training_config.save_interval",
    "eval_callbacks": "training_config.eval_interval",
    "runner_wrapper": "training_config.loss_scale and training_config.grad_clip_kwargs",
    "moe_config": "model_config.num_experts",
    "trainer": "the command: python -m ttp.trainer",
    "run_mode": "the command: run_distribute.sh ... train or predict",
    "use_parallel": "the number of ranks that ttprun starts",
    "seed": "training_config.seed",
    "output_dir": "training_config.output_dir",
    "load_checkpoint": "training_config.resume",
    "resume_training": "training_config.resume",
    "auto_trans_ckpt": "no such key, as a checkpoint loads under any layout",
    "only_save_strategy": "no such key, as a checkpoint names its layout itself",
    "micro_batch_interleave_num": "no such key, as micro-batches are not interleaved within a stage",
}
"""Top-level keys of a whole MindFormers file, and what has their part here."""


class _Section:
    """One section of the source: each key is taken once, and `finish` refuses the rest."""

    def __init__(self, name: str, given: object, notes: list[str]) -> None:
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name}: got {checked.shown(given)}, expected keys")
        self.name, self.notes = name, notes
        self._given = dict(given)
        self._known: list[str] = []

    def _take(self, key: str) -> Any:
        self._known.append(key)
        return self._given.pop(key, None)

    def refuse(self, key: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.name}.{key}: got {checked.shown(value)}, expected {expected}")

    def boolean(self, key: str) -> bool | None:
        value = self._take(key)
        if value is not None and type(value) is not bool:
            raise self.refuse(key, value, "true or false")
        return value

    def integer(self, key: str, least: int = 1) -> int | None:
        value = self._take(key)
        if value is not None and (type(value) is not int or value < least):
            raise self.refuse(key, value, f"an integer >= {least}")
        return value

    def choice(self, key: str, choices: Mapping[Any, Any], expected: str) -> Any:
        """Return what `choices` has for the value, whose type counts: True is not 1."""
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, int | str) or isinstance(value, bool) or value not in choices:
            raise self.refuse(key, value, expected)
        return choices[value]

    def text(self, key: str, expected: str) -> str | None:
        value = self._take(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, value, expected)
        return value

    def without_effect(self, key: str, reason: str) -> None:
        """Take a key that changes nothing here, and note it."""
        value = self._take(key)
        if value is not None:
            self.note(key, value, f"has no effect. {reason}")

    def note(self, key: str, value: object, what: str) -> None:
        self.notes.append(f"{self.name}.{key}: {checked.shown(value)} {what}")

    def finish(self, ours: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Return the remaining keys, where the section is one of ours too. Raises ConfigError for others."""
        if ours is None:
            for key in self._given:
                near = difflib.get_close_matches(str(key), self._known, n=1)
                hint = f"did you mean {near[0]}?" if near else "Leave it out"
                raise ConfigError(f"{self.name}.{key}: got an unknown key, expected {', '.join(self._known)}. {hint}")
        return self._given


class _Result:
    """The sections that come out. A key that the source sets twice, to different values, is refused."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self.sections = {name: dict(value) if isinstance(value, Mapping) else value for name, value in sections.items()}

    def set(self, key: str, value: object, source: str) -> None:
        section, _, name = key.partition(".")
        if self.sections.get(section) is None:
            self.sections[section] = {}
        place = self.sections[section]
        if not isinstance(place, dict):
            raise ConfigError(f"{section}: got {checked.shown(place)}, expected keys")
        if name in place and place[name] != value:
            raise ConfigError(
                f"{key}: got {checked.shown(place[name])}, expected {checked.shown(value)} as {source} says. Leave one of them out"
            )
        place[name] = value


def is_static(tree: Mapping[str, Any]) -> bool:
    """Say whether a file has keys of MindFormers' static-graph trainer."""
    parallel = tree.get("parallel_config")
    return any(name in tree for name in _SECTIONS) or (
        isinstance(parallel, Mapping) and any(key in parallel for key in _PARALLEL)
    )


def translate(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (sections of ours, notes on what has no effect). A file that is not `is_static` comes back as it is.

    Raises ConfigError for a key that is unknown, has a value that cannot be, or asks for what is not there.
    """
    if not is_static(tree):
        return dict(tree), []
    for name, place in _OTHER_SECTIONS.items():
        if name in tree:
            raise ConfigError(f"{name}: got a key of a whole MindFormers file, expected {place}")
    if tree.get("model_config") is None and tree.get("preset") is None:
        raise ConfigError(
            "model_config: missing, expected the model's sizes, or a preset's. Add a line: preset: gpt2_13b"
        )
    notes: list[str] = []
    result = _Result({name: value for name, value in tree.items() if name not in (*_SECTIONS, "parallel_config")})
    context, parallel, recompute, layout = (
        _Section(name, tree[name] if tree.get(name) is not None else {}, notes)
        for name in (*_SECTIONS, "parallel_config")
    )
    _context(context, result)
    tensor, stages, shard = _layout(layout, result)
    _parallel(parallel, result, tensor, stages, shard)
    _recompute(recompute, result, tensor)
    return result.sections, notes


def _context(section: _Section, result: _Result) -> None:
    mode = section.choice("mode", {0: 0, 1: 1}, "0 (graph mode) or 1 (dynamic)")
    if mode == 0:
        section.note(
            "mode", 0, "has no effect. The trainer runs eagerly; training_config.compile: true compiles each block"
        )
    device = section.choice("device_target", MINDSPORE_NAMES, " or ".join(MINDSPORE_NAMES))
    if device is not None:
        result.set("training_config.device", device, "context.device_target")
    memory = section.text("max_device_memory", "a size, as in 31GB")
    if memory is not None:
        result.set("training_config.max_device_memory", memory, "context.max_device_memory")
    section.without_effect("device_id", "ttprun gives each rank a device of its own")
    if section.boolean("save_graphs"):
        raise section.refuse("save_graphs", True, "false. There is no graph to save")
    for key in ("save_graphs_path", "max_call_depth", "enable_graph_kernel", "graph_kernel_flags"):
        section.without_effect(key, "There is no graph")
    section.finish()


def _layout(section: _Section, result: _Result) -> tuple[int, int, bool | None]:
    """Return (model_parallel, pipeline_stage, optimizer_shard)."""
    at = "parallel_config."
    tensor, stages = section.integer("model_parallel"), section.integer("pipeline_stage")
    named = {
        "data_parallel": section.integer("data_parallel"),
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "expert_model_parallel_size": section.integer("expert_parallel"),
    }
    sources = ("data_parallel", "model_parallel", "pipeline_stage", "expert_parallel")
    micro_batches = section.integer("micro_batch_num")
    shard = section.boolean("optimizer_shard")
    sequence = section.boolean("use_seq_parallel")
    if section.boolean("vocab_emb_dp"):
        section.note(
            "vocab_emb_dp", True, "has no effect. The vocabulary is always divided over the tensor-parallel ranks:"
            " the numbers are the same, and each rank needs less memory",
        )  # fmt: skip
    section.without_effect(
        "gradient_aggregation_group",
        "Gradients are aggregated in buckets that fill up during backward, not in a number of groups",
    )
    context = section.integer("context_parallel")
    if context not in (None, 1):
        raise section.refuse("context_parallel", context, "1. use_seq_parallel: True divides the sequence")
    result.sections["parallel_config"] = section.finish(ours={})
    for (name, value), source in zip(named.items(), sources, strict=True):
        if value is not None:
            result.set(at + name, value, at + source)
    if sequence is not None:
        result.set(at + "sequence_parallel", sequence, at + "use_seq_parallel")
    if micro_batches is not None and (stages or 1) > 1:
        result.set("dataset_config.micro_batch_num", micro_batches, at + "micro_batch_num")
    elif micro_batches not in (None, 1):
        section.note(
            "micro_batch_num", micro_batches, "has no effect with pipeline_stage 1, as in MindSpore."
            " dataset_config.micro_batch_num accumulates gradients",
        )  # fmt: skip
    return tensor or 1, stages or 1, shard


def _parallel(section: _Section, result: _Result, tensor: int, stages: int, shard: bool | None) -> None:
    numbers: dict[Any, str] = {**dict(enumerate(MODES)), **{name: name for name in MODES}}
    mode = section.choice("parallel_mode", numbers, "0 to 3: " + ", ".join(MODES))
    if mode == "data_parallel" and (tensor, stages) != (1, 1):
        raise section.refuse(
            "parallel_mode",
            0,
            f"1: parallel_config splits the model (model_parallel {tensor}, pipeline_stage {stages})",
        )
    if mode == "auto_parallel":
        raise section.refuse(
            "parallel_mode", 2, "0, 1 or 3, as a layout is chosen before a start. Set 1, and have layouts proposed:"
            " python -m ttp.trainer --config FILE --plan --search --world-size N",
        )  # fmt: skip
    full = section.boolean("full_batch")
    if full is not None:
        section.note(
            "full_batch", full, "has no effect. A step's sequences are the same either way,"
            " and each data-parallel rank reads only its own",
        )  # fmt: skip
    sharded = section.boolean("enable_parallel_optimizer")
    if sharded is not None and shard is not None and sharded != shard:
        raise section.refuse("enable_parallel_optimizer", sharded, f"{shard} as parallel_config.optimizer_shard says")
    sharded = shard if sharded is None else sharded
    if sharded is not None:
        result.set("training_config.use_distributed_optimizer", sharded, "parallel.enable_parallel_optimizer")
    mean = "A gradient is that of the mean over a step's tokens; training_config.loss_reduction changes it"
    section.without_effect("gradients_mean", mean)
    section.without_effect("loss_repeated_mean", mean)
    section.without_effect("search_mode", "It belongs to parallel_mode 2")
    section.without_effect("enable_alltoall", "Experts always exchange tokens by all-to-all")
    section.without_effect("strategy_ckpt_save_file", "A checkpoint names its layout itself")
    section.finish()


def _recompute(section: _Section, result: _Result, tensor: int) -> None:
    on, selective = section.boolean("recompute"), section.boolean("select_recompute")
    if on is not None or selective is not None:
        how = "full" if on else "selective" if selective else "none"
        result.set("training_config.recompute", how, "recompute_config.recompute")
    if section.boolean("parallel_optimizer_comm_recompute"):
        section.note(
            "parallel_optimizer_comm_recompute", True, "has no effect."
            " Parameters are gathered once a step and kept, so there is nothing to gather again",
        )  # fmt: skip
    if section.boolean("mp_comm_recompute") is False and (on or selective):
        section.note(
            "mp_comm_recompute", False, "has no effect. Recomputation repeats a block with its communication,"
            " as mp_comm_recompute: True does",
        )  # fmt: skip
    if section.boolean("recompute_slice_activation"):
        if tensor > 1 and (on or selective):
            source = "recompute_config.recompute_slice_activation"
            result.set("parallel_config.sequence_parallel", True, source)
        else:
            section.note("recompute_slice_activation", True, "has no effect without recompute and model_parallel")
    section.finish()
