"""The configuration of a training run: five frozen sections, each checked where it is defined.

Owns the keys, their types, defaults, ranges and the checks across keys. Never reads a file, the command line or the
environment (`loader.py` does), and never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ttp.errors import ConfigError

from ..devices.device_table import DeviceName
from .memory_size import memory_bytes

BYTE_VALUES = 256
"""Token ids of byte-level text."""

LARGEST = 2**31 - 1
"""Of every size: products of two fit into 64 bits."""
MOST_LAYERS = 10_000
MOST_FEED_FORWARDS = 100_000
"""Layers times experts: each is an object of its own."""

DType = Literal["float32", "bfloat16", "float16"]


def check(ok: bool, key: str, value: object, expected: str) -> None:
    """Raise ConfigError naming the key, its value and what was expected, unless `ok`."""
    if not ok:
        raise ConfigError(f"{key}: got {value!r}, expected {expected}")


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GradClipConfig:
    grad_clip_type: Literal["ClipGlobalNorm", "GradClipByValue"] = "ClipGlobalNorm"
    """ClipGlobalNorm scales all gradients when their global L2 norm exceeds clip_value; GradClipByValue clamps each element."""
    clip_value: float = 1.0
    """Largest norm, or largest absolute element."""

    def __post_init__(self) -> None:
        key = "training_config.grad_clip_kwargs.clip_value"
        check(_positive(self.clip_value), key, self.clip_value, "a finite number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFuncConfig:
    loss_func_type: Literal["VocabParallelCrossEntropy", "CrossEntropyLoss"] = "VocabParallelCrossEntropy"
    """VocabParallelCrossEntropy keeps the logits divided over tensor-parallel ranks; CrossEntropyLoss gathers them on each. Equal
    to round-off, and the same without tensor parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    seed: int = 42
    """Fixes weights, data order and dropout."""
    device: DeviceName = "auto"
    """auto takes the first accelerator that is there, else the CPU."""
    shared_device: bool = False
    """All ranks of a host use its first device: slow, to test several ranks where there is one device."""
    deterministic: bool = True
    """Only kernels that give the same bits every time: what makes a resumed run equal an uninterrupted one."""
    cpu_threads: int | None = None
    """Threads of one rank's CPU kernels; null: torch's choice (OMP_NUM_THREADS). Other counts give other bits."""
    output_dir: str = "./output"
    """Where logs, metrics and checkpoints go."""
    training_iters: int = 10
    """Optimizer updates to do in all, resumed ones included."""
    tensorboard: str | None = None
    """Folder for TensorBoard's event files, which rank 0 writes; null: none."""
    eval_interval: int | None = None
    """The loss on held-out text every so many steps and after the last one; null: never."""
    eval_sequences: int = 64
    """Held-out sequences of an evaluation, the same under every layout and batch size; fewer where fewer are held out."""
    log_interval: int = 1
    """A log line every so many steps."""
    save_interval: int | None = None
    """A checkpoint every so many steps; null: only at faults. The last step is saved in any case."""
    keep_checkpoint_max: int | None = None
    """After a save the newest so many valid checkpoints of each folder stay and older ones are removed, as by `ttp ckpt prune`; null: all stay."""
    save_dirs: tuple[str, ...] | None = None
    """Checkpoint folders in order of preference (a full one falls through to the next); null: output_dir/checkpoints."""
    loss_scale: float | None = None
    """Initial dynamic loss scale, for float16; null: none."""
    loss_scale_window: int = 1000
    """Steps without an overflow after which the loss scale doubles; 0: the scale stays as it is."""
    grad_clip_kwargs: GradClipConfig | None = field(default_factory=GradClipConfig)
    """Gradient clipping; null: none."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """The gradient is that of the mean, or of the sum, of the losses of a step's tokens. Logs show the mean either way."""
    loss_func_kwargs: LossFuncConfig = field(default_factory=LossFuncConfig)
    use_distributed_optimizer: bool = True
    """False: every rank holds the whole optimizer state (as many replicas as ranks)."""
    gradient_accumulation_shard: bool = False
    """Reduce the gradients of every micro-batch at once and accumulate each rank's shards only: less memory, more bytes sent.
    Without effect where every data-parallel rank holds all shards."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again to save memory. full: of each block all but its input; selective: all but its
    input and the results of matrix products and attention."""
    compile: bool = False
    """Let torch.compile compile each block: faster steps after a start that takes minutes. Other bits than without.
    Not for experts that tensor-parallel ranks share."""
    resume: str = "auto"
    """auto: from the newest valid checkpoint of output_dir, if any; never; or a checkpoint's path."""
    local_copy_os: bool = False
    """Keep a copy of the last step's optimizer state: more memory, more steps to choose from at a fault."""
    copies: Literal["memory"] | None = None
    """memory: copies of each rank's shards in its node's memory, and of what has no replica on another node in the next node's; null: none."""
    max_device_memory: str | None = None
    """Memory of a rank's device that --plan compares its estimate with, as in 31GB; null: none."""

    def __post_init__(self) -> None:
        at = "training_config."
        check(0 <= self.seed < 2**63, at + "seed", self.seed, "0 to 2**63 - 1")
        threads = self.cpu_threads
        check(threads is None or threads >= 1, at + "cpu_threads", threads, "1 or more, or null")
        check(self.output_dir.strip() != "", at + "output_dir", self.output_dir, "a folder")
        board = self.tensorboard
        check(board is None or board.strip() != "", at + "tensorboard", board, "a folder, or null for none")
        check(self.training_iters >= 1, at + "training_iters", self.training_iters, "1 or more")
        check(self.log_interval >= 1, at + "log_interval", self.log_interval, "1 or more")
        save = self.save_interval
        check(save is None or save >= 1, at + "save_interval", save, "1 or more, or null for none")
        kept = self.keep_checkpoint_max
        check(kept is None or kept >= 1, at + "keep_checkpoint_max", kept, "1 or more, or null for all")
        every = self.eval_interval
        check(every is None or every >= 1, at + "eval_interval", every, "1 or more, or null for never")
        check(self.eval_sequences >= 1, at + "eval_sequences", self.eval_sequences, "1 or more")
        folders = self.save_dirs
        check(
            folders is None or (len(folders) > 0 and all(f.strip() for f in folders)),
            at + "save_dirs",
            folders,
            "folders, or null",
        )
        scale = self.loss_scale
        check(scale is None or _positive(scale), at + "loss_scale", scale, "a finite number above 0, or null for none")
        check(self.loss_scale_window >= 0, at + "loss_scale_window", self.loss_scale_window, "0 or more")
        check(self.resume.strip() != "", at + "resume", self.resume, "auto, never or a checkpoint's path")
        if self.max_device_memory is not None:
            memory_bytes(self.max_device_memory, at + "max_device_memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    data_parallel: int | None = None
    """Ranks that train on different data, checked at the start; null: what the other axes leave of the world."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are divided into."""
    expert_model_parallel_size: int = 1
    """Ranks that the experts of a layer are divided over (taken from the data-parallel axis)."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks of each pipeline stage; null: one."""
    sequence_parallel: bool = False
    """Divide activations along the sequence between tensor-parallel ranks."""
    optimizer_replicas: int = 2
    """Ranks that hold each shard of the optimizer state: one fewer may die at a time."""
    compare_replicas_every: int = 100
    """Steps after which the bits of all replicas are compared, to find silent corruption; 0: never."""
    on_divergence: Literal["report", "stop", "repair"] = "report"
    """What follows a difference between replicas: report it, stop the job, or repair (replace the process that most holders prove wrong)."""
    gradient_buckets: int | None = None
    """About how many messages a rank's gradients are sent in; null: one for each 25 MiB."""

    def __post_init__(self) -> None:
        at = "parallel_config."
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
            check(getattr(self, name) >= 1, at + name, getattr(self, name), "1 or more")
        check(self.optimizer_replicas >= 1, at + "optimizer_replicas", self.optimizer_replicas, "1 or more")
        for name in ("data_parallel", "virtual_pipeline_model_parallel_size", "gradient_buckets"):
            value = getattr(self, name)
            check(value is None or value >= 1, at + name, value, "1 or more, or null")
        every = self.compare_replicas_every
        check(every >= 0, at + "compare_replicas_every", every, "a number of steps, or 0 for never")

    def data_parallel_size(self, world_size: int) -> int:
        """Return the size of the data-parallel axis. Raises ConfigError when the world is not the product of the axes."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        ep = self.expert_model_parallel_size
        dp, rest = divmod(world_size, tp * pp)
        if rest or dp == 0:
            raise ConfigError(
                f"{world_size} ranks are not tensor {tp} x pipeline {pp} x data parallel: {world_size} is not a multiple of"
                f" {tp * pp}; start a multiple of {tp * pp} ranks, or change parallel_config"
            )
        if self.data_parallel not in (None, dp):
            raise ConfigError(
                f"parallel_config.data_parallel: got {self.data_parallel}, expected {dp} for {world_size} ranks with tensor {tp} x"
                f" pipeline {pp}. Start {self.data_parallel * tp * pp} ranks, or set it to null"
            )
        if dp % ep:
            raise ConfigError(
                f"{world_size} ranks = tensor {tp} x pipeline {pp} x data {dp}, and expert parallel {ep} does not divide the"
                f" data-parallel size {dp}; change parallel_config.expert_model_parallel_size"
            )
        if self.sequence_parallel and tp == 1:
            raise ConfigError(
                "parallel_config.sequence_parallel is true without tensor parallelism, expected false, or"
                " tensor_model_parallel_size of 2 or more"
            )
        return dp

    def replicas(self, data_parallel_size: int, use_distributed_optimizer: bool) -> int:
        """Return how many ranks hold each optimizer shard (a lone rank: 1). Raises ConfigError when it cannot be."""
        dp, same_experts = data_parallel_size, data_parallel_size // self.expert_model_parallel_size
        replicas = self.optimizer_replicas if use_distributed_optimizer else dp
        if replicas > 2 and same_experts < dp and same_experts % replicas:
            asked, true = f"parallel_config.optimizer_replicas is {replicas}", ""
            if not use_distributed_optimizer:
                asked = f"training_config.use_distributed_optimizer is false, so {replicas} ranks would hold each shard"
                true = "true, and "
            raise ConfigError(
                f"{asked}, and {same_experts} ranks have the same experts (data {dp} / expert {self.expert_model_parallel_size}):"
                f" expected {true}optimizer_replicas 2 or a divisor of {same_experts}"
            )
        if not use_distributed_optimizer:
            return dp
        if dp == 1:
            return 1
        if replicas > dp or (dp % replicas and replicas != 2):
            raise ConfigError(
                f"parallel_config.optimizer_replicas: got {replicas}, expected 2, or a divisor of the data-parallel size, {dp}"
            )
        return replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    num_layers: int
    """Decoder blocks."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads."""
    head_dim: int | None = None
    """Size of a head; null: hidden_size / num_attention_heads."""
    params_dtype: DType = "float32"
    """Type of the parameters; the optimizer keeps float32 masters of shorter ones."""
    compute_dtype: DType = "float32"
    """Type of the matrix products: params_dtype, or a shorter one (by autocast)."""
    position_embedding_type: Literal["rope", "absolute"] = "rope"
    """rope rotates queries and keys; absolute learns a vector for each position."""
    rotary_base: float = 10000.0
    """Base of the rotary wave lengths."""
    untie_embeddings_and_output_weights: bool = True
    """False: the token embedding is the output matrix too."""
    ffn_hidden_size: int | None = None
    """Width inside the feed-forward; null: 4 x hidden, and 8/3 x hidden rounded up to a multiple of 64 for swiglu."""
    group_query_attention: bool = False
    """Several query heads share one key and value head."""
    num_query_groups: int | None = None
    """Key and value heads with group_query_attention; null without it."""
    num_experts: int | None = None
    """Feed-forwards of each block, of which a router chooses some for each token; null: one, for all tokens."""
    num_experts_per_token: int = 2
    """Experts that each token goes to, with num_experts."""
    router_aux_loss_coef: float = 0.01
    """Weight of the loss that keeps the experts evenly used, the mean over the layers; 0: none."""
    seq_length: int = 128
    """Tokens in a training sequence."""
    vocab_size: int = BYTE_VALUES
    """Token ids; byte-level text uses the first 256."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """swiglu has a third, gating matrix; gelu_tanh is GPT-2's approximation."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_eps: float = 1e-5
    use_bias: bool = False
    """Biases in the linear layers (LayerNorm has its own always)."""
    hidden_dropout: float = 0.0
    """Dropout of the embeddings and of each block's two contributions."""
    attention_dropout: float = 0.0
    """Dropout of the attention weights."""
    encoder_attn_mask_type: Literal["causal"] | None = None
    """causal and null mean the same: a token attends to itself and to earlier ones."""
    fp16_lm_cross_entropy: bool = False
    """Compute each token's loss in float16, with compute_dtype float16; False: in float32. Sums of losses are float32."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; the two output matrices of a block have it divided by sqrt(2 x num_layers)."""

    def __post_init__(self) -> None:
        at = "model_config."
        positive = ("num_layers", "hidden_size", "num_attention_heads", "head_dim", "seq_length", "vocab_size")
        for name in (*positive, "ffn_hidden_size"):
            value, most = getattr(self, name), MOST_LAYERS if name == "num_layers" else LARGEST
            check(value is None or 1 <= value <= most, at + name, value, f"1 to {most}")
        for name in ("hidden_dropout", "attention_dropout"):
            check(0 <= getattr(self, name) < 1, at + name, getattr(self, name), "0 <= p < 1")
        for name in ("rotary_base", "norm_eps", "init_std"):
            check(_positive(getattr(self, name)), at + name, getattr(self, name), "a finite number above 0")
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ConfigError(
                f"{at}hidden_size: got {self.hidden_size}, expected a multiple of num_attention_heads, {heads}, or a head_dim"
            )
        if self.position_embedding_type == "rope" and self.head_size % 2:
            raise ConfigError(
                f"{at}hidden_size / num_attention_heads: got {self.head_size}, expected an even size, rope rotates pairs;"
                " change either, set an even head_dim, or set position_embedding_type: absolute"
            )
        self._check_groups(at)
        experts, chosen = self.num_experts, self.num_experts_per_token
        check(experts is None or experts >= 1, at + "num_experts", experts, "1 or more, or null for none")
        feed_forwards, most = self.num_layers * (experts or 1), MOST_FEED_FORWARDS
        check(feed_forwards <= most, at + "num_layers x num_experts", feed_forwards, f"at most {most}")
        expected = f"1 to num_experts, {experts}"
        check(1 <= chosen <= (experts or chosen), at + "num_experts_per_token", chosen, expected)
        coefficient = self.router_aux_loss_coef
        check(
            math.isfinite(coefficient) and coefficient >= 0,
            at + "router_aux_loss_coef",
            coefficient,
            "a finite number, 0 or more",
        )
        if self.params_dtype not in ("float32", self.compute_dtype):
            raise ConfigError(
                f"{at}params_dtype: got {self.params_dtype!r} and compute_dtype {self.compute_dtype!r}, expected float32"
                " parameters, or both the same"
            )
        if self.fp16_lm_cross_entropy and self.compute_dtype != "float16":
            raise ConfigError(
                f"{at}fp16_lm_cross_entropy is true: got {at}compute_dtype {self.compute_dtype}, expected float16, the type of the"
                " logits. Change either"
            )

    def _check_groups(self, at: str) -> None:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if not self.group_query_attention:
            if groups not in (None, heads):
                raise ConfigError(
                    f"{at}num_query_groups is {groups}, but group_query_attention is off: turn it on, or say null"
                )
        elif groups is None or groups < 1 or heads % groups:
            raise ConfigError(f"{at}num_query_groups: got {groups}, expected a divisor of num_attention_heads, {heads}")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return -(-8 * self.hidden_size // (3 * 64)) * 64
        return 4 * self.hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    batch_size: int = 1
    """Sequences in a micro-batch of one rank."""
    micro_batch_num: int = 1
    """Micro-batches of one rank in a step (gradient accumulation)."""
    dataset_dir: str | None = None
    """A text file or a folder of them (read in sorted order), token files (.npy, .bin with .idx, .bin), or a folder that
    `datasets` saved; null: the text of Python's own manual."""
    tokenizer: str | None = None
    """A local tokenizer: a tokenizer.json, or a folder with one or with transformers' files; null: text is read as bytes."""
    text_column: str = "text"
    """Column of a `datasets` folder that has the text; input_ids is taken as tokens."""
    token_dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] = "uint16"
    """Type of the ids in a .bin file that has no .idx beside it."""
    cache_dir: str | None = None
    """Where tokenized text is kept, to be used again; null: output_dir/prepared."""
    validation_share: float = 0.0
    """Share of the sequences, the last ones, that is held out of training for the validation loss."""
    shuffle: bool = True
    """Draw the sequences of each epoch in a seeded random order."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_num"):
            check(getattr(self, name) >= 1, f"dataset_config.{name}", getattr(self, name), "1 or more")
        for name in ("dataset_dir", "tokenizer", "cache_dir"):
            path = getattr(self, name)
            check(path is None or path.strip() != "", f"dataset_config.{name}", path, "a file, a folder or null")
        share = self.validation_share
        check(0 <= share < 1, "dataset_config.validation_share", share, "0 (none) or more, and less than 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    warmup_steps: int = 0
    """Steps of linear growth to learning_rate."""
    decay_steps: int | None = None
    """Step at which end_learning_rate is reached, warm-up included; null: training_iters (a shorter training ends in its warm-up)."""
    use_cosine: bool = True
    """Decay along half a cosine, else along a line."""
    end_learning_rate: float = 0.0
    """Learning rate from decay_steps on."""

    def __post_init__(self) -> None:
        at = "optimizer_config.learning_rate_scheduler_kwargs."
        check(self.warmup_steps >= 0, at + "warmup_steps", self.warmup_steps, "0 or more")
        steps, expected = (
            self.decay_steps,
            f"more than the {self.warmup_steps} warmup_steps, which it includes, or null",
        )
        check(steps is None or steps > self.warmup_steps, at + "decay_steps", steps, expected)
        end = self.end_learning_rate
        check(math.isfinite(end) and end >= 0, at + "end_learning_rate", end, "a finite number, 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    optimizer_type: Literal["AdamW", "Adam", "SGD", "mint.AdamW", "SpeedAdamW"] = "AdamW"
    """AdamW decays weights directly, Adam and SGD through the gradient; mint.AdamW and SpeedAdamW are AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments; not used by SGD."""
    eps: float = 1e-8
    """Added to the denominator; not used by SGD."""
    momentum: float = 0.0
    """Of SGD; 0: it has no state."""
    nesterov: bool = False
    """Nesterov's momentum, with SGD."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Of matrices and embeddings; norms and biases have none."""
    learning_rate_scheduler_kwargs: ScheduleConfig | None = None
    """Warm-up and decay; null: constant."""

    def __post_init__(self) -> None:
        at = "optimizer_config."
        check(all(0 <= beta < 1 for beta in self.betas), at + "betas", list(self.betas), "two numbers, 0 <= beta < 1")
        check(_positive(self.eps), at + "eps", self.eps, "a finite number above 0")
        rate, decay = self.learning_rate, self.weight_decay
        check(math.isfinite(rate) and rate >= 0, at + "learning_rate", rate, "a finite number, 0 or more")
        check(math.isfinite(decay) and decay >= 0, at + "weight_decay", decay, "a finite number, 0 or more")
        check(0 <= self.momentum < 1, at + "momentum", self.momentum, "0 <= momentum < 1")
        if self.momentum and self.optimizer_type != "SGD":
            raise ConfigError(
                f"{at}momentum with {at}optimizer_type {self.optimizer_type}: got {self.momentum}, expected 0. Set betas, or"
                " optimizer_type SGD"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError(f"{at}nesterov: got true with momentum 0, expected a momentum above 0. Set momentum")
        schedule = self.learning_rate_scheduler_kwargs
        if schedule is not None and schedule.end_learning_rate > rate:
            raise ConfigError(
                f"{at}learning_rate_scheduler_kwargs.end_learning_rate: got {schedule.end_learning_rate!r}, expected at most"
                f" {at}learning_rate, {rate!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole configuration of a run. The world size is checked when it is known (`ParallelConfig.data_parallel_size`)."""

    model_config: ModelConfig
    training_config: TrainingConfig = field(default_factory=TrainingConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    dataset_config: DatasetConfig = field(default_factory=DatasetConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        vocab, data = self.model_config.vocab_size, self.dataset_config
        if data.tokenizer is None and data.dataset_dir is None:
            expected = f"{BYTE_VALUES} or more: the text is read as bytes"
            check(vocab >= BYTE_VALUES, "model_config.vocab_size", vocab, expected)
        if self.training_config.eval_interval is not None and data.validation_share == 0:
            raise ConfigError(
                f"training_config.eval_interval is {self.training_config.eval_interval}, and dataset_config.validation_share is 0:"
                " nothing is held out to evaluate on; set a share, as in 0.05, or eval_interval: null"
            )
        if self.model_config.compute_dtype == "float16" and self.training_config.loss_scale is None:
            raise ConfigError(
                "model_config.compute_dtype is 'float16': its gradients vanish without training_config.loss_scale"
            )

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate stops falling, beyond the warm-up."""
        schedule = self.optimizer_config.learning_rate_scheduler_kwargs
        if schedule is not None and schedule.decay_steps is not None:
            return schedule.decay_steps
        return max(self.training_config.training_iters, schedule.warmup_steps + 1 if schedule is not None else 1)

    def batch_size(self, data_parallel_size: int) -> int:
        """Return the sequences of one step, over all ranks."""
        return self.dataset_config.batch_size * self.dataset_config.micro_batch_num * data_parallel_size


def plain(config: Any) -> dict[str, Any]:
    """Return a config dataclass as plain values, for JSON."""
    from dataclasses import asdict

    return asdict(config)
