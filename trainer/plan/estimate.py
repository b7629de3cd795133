"""What a run would need, without starting anything: the numbers of `--plan` (`command.py`) and of its search (`search.py`).

Owns the arithmetic of a layout: parameters, memory, operations, bytes on the wire, pipeline bubble, bytes and time of a dying gasp, and what
is survived.
Sizes are those of the rank that has the most. Nothing is allocated: the model is built on torch's meta device.

Activations are those that torch's operators keep for backward, counted operator by operator, without the attention matrix, which
`scaled_dot_product_attention` does not keep. Source: collectives by Thakur et al., Optimization of Collective Communication
Operations in MPICH (2005).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ttp

from ..config.memory_size import memory_bytes
from ..config.schema import Config, ModelConfig
from ..model.gpt import DTYPES, GPT, PipelineStage, count_parameters, stages
from ..parallel.optimizer import state_tensors
from ..parallel.pipeline_stages import check_stages
from ..parallel.tensor import check_divides, divides_logits

MASTER_BYTES = REDUCED_BYTES = 4
"""Memory of their own for parameters and gradients shorter than FP32; in FP32 parameters are their own masters and gradients are
reduced in place."""
BUCKET_BYTES = 25 * 2**20
BUCKETS_UNDER_WAY = 4
"""Of gradients that accumulate in shards: so many buckets are filled or reduced at a time (ttp/optim/buckets.py)."""
GIB = 2**30
MOST_RANKS = 1_000_000
"""Of a plan: every rank's place is looked at."""
_RECOMPUTED = {
    "none": "nothing recomputed",
    "selective": "cheap operations recomputed",
    "full": "every layer recomputed",
}
_BY_TENSOR_RANKS = (
    "wq.weight", "wk.weight", "wv.weight", "wo.weight", "gate.weight", "up.weight", "down.weight", "wq.bias", "wk.bias", "wv.bias",
    "gate.bias", "up.bias",
)  # fmt: skip
"""Parameters that tensor-parallel ranks share evenly."""
_BY_ROWS = ("embedding.weight", "positions.weight", "output.weight")
"""Those whose rows they share, the first ranks one or more rows more. All others are copies."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Bytes are a rank's, of the rank that has the most."""

    axes: dict[str, int]
    parameters: int
    local_parameters: int
    weights: int
    gradients: int
    gradients_otherwise: int
    """With gradient_accumulation_shard where it is off, without it where it is on."""
    optimizer: int
    copies: int
    """How much of `optimizer` is there for the replicas' sake."""
    activations: int
    """Of the micro-batches in flight."""
    data_parallel_wire: int
    """Sent in a step: gradients and parameters."""
    data_parallel_wire_otherwise: int
    """As `gradients_otherwise`."""
    accumulation_shard: bool
    shards: int
    """Of a data-parallel group's parameters."""
    tensor_wire: int
    pipeline_wire: int
    expert_wire: int
    flops: float
    """Floating-point operations of a step's matrix products and attention, recomputation included."""
    bubble: float
    """Time that a rank waits for its pipeline, as a share of the time that it computes."""
    dump: int
    """Of the whole job."""
    recompute: str
    replicas: int
    """Holders of each shard outside the experts."""
    expert_replicas: int
    """Holders of each shard of the experts; the same, where they are not divided."""
    apart: bool
    """The holders of every shard sit on different nodes."""
    nodes: int

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def sent(self) -> int:
        return self.data_parallel_wire + self.tensor_wire + self.pipeline_wire + self.expert_wire


def make_plan(config: Config, world_size: int, devices_per_node: int = 8) -> RunPlan:
    """Return the plan. Raises ConfigError for whatever layout a start would refuse."""
    parallel, model, data = config.parallel_config, config.model_config, config.dataset_config
    dp = parallel.data_parallel_size(world_size)
    check_divides(config)
    check_stages(config)
    tp, pp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
    )
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    replicas = parallel.replicas(dp, config.training_config.use_distributed_optimizer)
    cut = stages(model.num_layers, pp * chunks)
    dense, experts = max(
        (_local(config, [cut[chunk * pp + rank] for chunk in range(chunks)]) for rank in range(pp)), key=sum
    )
    local = dense + experts
    dtype = DTYPES[model.params_dtype].itemsize
    ring = bool(dp % replicas or dp // ep % replicas)
    optimizer, alone = (
        _optimizer(config, dense, dp, holders, ring) + _optimizer(config, experts, dp // ep, holders, ring)
        for holders in (replicas, 1)
    )
    shard = config.training_config.gradient_accumulation_shard
    gradients, otherwise = (
        _gradients(config, dense, dp, replicas, on) + _gradients(config, experts, dp // ep, replicas, on)
        for on in (shard, not shard)
    )
    passes, no_passes = (data.micro_batch_num, 0) if shard else (0, data.micro_batch_num)
    wire, wire_otherwise = (
        _wire(dense, dp, replicas, dtype, count) + _wire(experts, dp // ep, replicas, dtype, count)
        for count in (passes, no_passes)
    )
    tokens = data.batch_size * model.seq_length
    compute = DTYPES[model.compute_dtype].itemsize
    layers = -(-model.num_layers // pp)
    between = tokens * model.hidden_size * dtype // (tp if parallel.sequence_parallel else 1)
    moe = ep > 1 and model.num_experts is not None
    return RunPlan(
        axes={"data": dp, "tensor": tp, "pipeline": pp, "expert": ep},
        parameters=count_parameters(model),
        local_parameters=local,
        weights=local * dtype,
        gradients=gradients,
        gradients_otherwise=otherwise,
        optimizer=optimizer,
        copies=optimizer - alone,
        activations=_activations(config, local),
        data_parallel_wire=wire,
        data_parallel_wire_otherwise=wire_otherwise,
        accumulation_shard=shard,
        shards=dp // replicas if dp % replicas == 0 else dp,
        tensor_wire=int(
            (2 * _all_reduces(config, layers) * model.hidden_size + (0 if divides_logits(config) else model.vocab_size))
            * data.micro_batch_num * (tp - 1) / tp * tokens * compute
        ),
        pipeline_wire=2 * chunks * data.micro_batch_num * between if pp > 1 else 0,
        expert_wire=int(
            (4 if config.training_config.recompute == "none" else 6) * layers * data.micro_batch_num * (ep - 1) / ep
            * tokens * model.num_experts_per_token * model.hidden_size * compute
        )
        if moe
        else 0,
        flops=_flops(config, dense, experts, layers),
        bubble=(pp - 1) / (data.micro_batch_num * chunks),
        dump=optimizer_bytes(config) * count_parameters(model),
        recompute=config.training_config.recompute,
        replicas=replicas,
        expert_replicas=min(replicas, dp // ep),
        apart=_apart(dp, tp, pp, ep, replicas, devices_per_node),
        nodes=-(-world_size // devices_per_node),
    )  # fmt: skip


def _local(config: Config, mine: Sequence[PipelineStage]) -> tuple[int, int]:
    """Return (elements outside the experts, elements of experts) of the parameters that a rank has of these stages."""
    model, tp = config.model_config, config.parallel_config.tensor_model_parallel_size
    ep = config.parallel_config.expert_model_parallel_size
    here = range((model.num_experts or 0) // ep)
    found = [0, 0]
    for stage in mine:
        same = PipelineStage(0, stage.stop_layer - stage.first_layer, stage.begins, stage.ends)  # layers are alike
        for name, shape in _shapes(model, same, here):
            rows = -(-shape[0] // tp) if name.endswith(_BY_ROWS) else shape[0]
            slices = tp if name.endswith(_BY_TENSOR_RANKS) else 1
            found[".experts." in name] += rows * math.prod(shape[1:]) // slices
    return found[0], found[1]


def optimizer_bytes(config: Config) -> int:
    """Return the bytes of an element's FP32 master and state; a checkpoint has the same."""
    return MASTER_BYTES * (1 + state_tensors(config.optimizer_config))


@functools.lru_cache(maxsize=1024)
def _shapes(model: ModelConfig, stage: PipelineStage, experts: range) -> tuple[tuple[str, torch.Size], ...]:
    """Return name and shape of every parameter of a stage."""
    with torch.device("meta"):
        built = GPT(model, stage, experts)
    return tuple((name, parameter.shape) for name, parameter in built.named_parameters())


def _flops(config: Config, dense: int, experts: int, layers: int) -> float:
    """Return a rank's operations in a step: 6 for each parameter and token, and attention's own. `dense`, `experts`: its parameters.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training (2021), appendix; selective recomputation by Korthikanti et al.,
    Reducing Activation Recomputation in Large Transformer Models (2022), which measure 2 to 4 % where this takes 5.
    """
    model, data, recompute = config.model_config, config.dataset_config, config.training_config.recompute
    tokens = data.batch_size * data.micro_batch_num * model.seq_length
    ep, tp = config.parallel_config.expert_model_parallel_size, config.parallel_config.tensor_model_parallel_size
    chosen = ep * model.num_experts_per_token / model.num_experts if model.num_experts else 0
    products = 6 * (dense + experts * chosen) * tokens
    attention = 12 * layers * model.seq_length * model.num_attention_heads * model.head_size / tp * tokens
    again = {"none": 1.0, "selective": 1.05, "full": 4 / 3}[recompute]
    attention_again = 4 / 3 if recompute == "full" or (recompute == "selective" and model.attention_dropout) else 1.0
    return products * again + attention * attention_again


def _optimizer(config: Config, numel: int, ranks: int, replicas: int, ring: bool) -> int:
    """Return the bytes of a rank's shards of parameters that it shares with `ranks` (see ttp/optim/held_shards.py)."""
    replicas = min(replicas, ranks)
    state = optimizer_bytes(config)
    backup = state if config.training_config.local_copy_os else 0
    if DTYPES[config.model_config.params_dtype] != torch.float32:
        return numel * replicas * (state + REDUCED_BYTES + backup) // ranks
    second = MASTER_BYTES if ring and replicas > 1 else 0  # the master of the shard that another rank gathers from
    return numel * (replicas * (state - MASTER_BYTES + backup) + second) // ranks


def _gradients(config: Config, numel: int, ranks: int, replicas: int, shard: bool) -> int:
    """Return the bytes of a rank's gradients of parameters that it shares with `ranks`; with `shard` those of its shards and of the
    buckets under way. A tied embedding of two stages stays whole."""
    model, tp = config.model_config, config.parallel_config.tensor_model_parallel_size
    dtype = DTYPES[model.params_dtype]
    whole, replicas = numel * dtype.itemsize, min(replicas, ranks)
    if not shard or ranks == replicas:
        return whole
    embedding = model.vocab_size * model.hidden_size
    tied = config.parallel_config.pipeline_model_parallel_size > 1 and not model.untie_embeddings_and_output_weights
    kept = embedding // tp * dtype.itemsize if tied else 0
    accumulated = (
        (whole - kept) * replicas // ranks if dtype == torch.float32 else 0
    )  # else `_optimizer` has counted them
    largest = max(embedding, model.hidden_size * model.ffn_size) // tp * dtype.itemsize
    return accumulated + kept + min(whole - kept, BUCKETS_UNDER_WAY * max(BUCKET_BYTES, largest))


def _activations(config: Config, local: int) -> int:
    """Return the bytes that backward needs of the micro-batches in flight, with one layer of them while it is recomputed.
    `local`: elements of the parameters here, which autocast keeps in short, too."""
    model, data, parallel = config.model_config, config.dataset_config, config.parallel_config
    tokens = data.batch_size * model.seq_length
    taken, needed, products = _layer(config)
    kept, again = needed, 0.0
    if config.training_config.recompute != "none":
        kept, again = taken, needed
    if config.training_config.recompute == "selective":
        kept += products
    width = DTYPES[model.compute_dtype].itemsize
    # The last norm takes a layer's stream and gives the output's; the loss is computed in FP32.
    columns = model.vocab_size / (parallel.tensor_model_parallel_size if divides_logits(config) else 1)
    ending = taken + model.hidden_size * width + columns * 4
    short = local * width if model.compute_dtype != model.params_dtype else 0
    return int(tokens * (_layers_in_flight(config) * kept + again + ending)) + short


def _layers_in_flight(config: Config) -> float:
    """Return how many layers' activations of one micro-batch the first rank of a pipeline keeps at a time.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training (2021), section 2.2: of an interleaved schedule the
    passes before the first backward.
    """
    ranks, count = config.parallel_config.pipeline_model_parallel_size, config.dataset_config.micro_batch_num
    chunks = config.parallel_config.virtual_pipeline_model_parallel_size or 1
    passes = ranks if chunks == 1 else 2 * (ranks - 1) + (chunks - 1) * ranks + 1
    return -(-config.model_config.num_layers // ranks) * min(passes, count * chunks) / chunks


def _layer(config: Config) -> tuple[float, float, float]:
    """Return bytes a token of one layer: (its input, all that backward needs, what matrix products and attention gave)."""
    model, parallel = config.model_config, config.parallel_config
    tp, hidden = parallel.tensor_model_parallel_size, model.hidden_size
    query, kv, ffn = (
        size / tp
        for size in (model.num_attention_heads * model.head_size, model.kv_heads * model.head_size, model.ffn_size)
    )
    up = 2 if model.activation == "swiglu" else 1
    chosen = model.num_experts_per_token if model.num_experts is not None else 1
    mine = hidden / (tp if parallel.sequence_parallel else 1)
    taken = mine * DTYPES[model.params_dtype].itemsize
    autocast = model.compute_dtype != model.params_dtype
    # Gathered where the sequence is divided; autocast shortens it anew for each matrix that takes it.
    into = hidden * ((3 if autocast else 1) + chosen * (up if autocast else 1))
    weighed = 2 * chosen * hidden if model.num_experts is not None else 0  # what experts gave, and that weighed
    inner = 2 * query + 2 * kv + chosen * 2 * up * ffn  # with what attention gave, and both sides of the activation
    short = DTYPES[model.compute_dtype].itemsize
    masks = 2 * mine if model.hidden_dropout else 0
    products = 2 * query + 2 * kv + hidden + chosen * (up * ffn + hidden)
    return taken, 2 * taken + (into + weighed + inner) * short + masks, products * short


def _wire(numel: int, ranks: int, replicas: int, dtype: int, passes: int) -> int:
    """Return the bytes that a rank sends for its gradients and its parameters (see ttp/optim/collectives.py). `passes`: of gradients that
    accumulate in shards; 0: they accumulate whole."""
    if ranks == 1 or numel == 0:
        return 0
    replicas = min(replicas, ranks)
    shards = ranks if ranks % replicas else ranks // replicas
    row = (1 - 1 / shards) * numel * dtype
    summed = REDUCED_BYTES if passes and shards > 1 else dtype
    if ranks % replicas:
        exchanged = numel / shards * summed
    elif summed == REDUCED_BYTES:
        exchanged = 2 * (replicas - 1) / replicas * numel / shards * REDUCED_BYTES
    else:
        exchanged = (replicas - 1) * numel / shards * dtype
    return int(max(1, passes) * row + exchanged + row)


def _all_reduces(config: Config, layers: int) -> float:
    """Return how often tensor-parallel ranks add up the activations of a micro-batch: forward and backward, of each half of a layer
    and at both ends of the model. A gather or a scatter is half of one. Recomputation does the forward's again, but for what ends a
    layer, which nothing in backward needs."""
    model, sequence = config.model_config, config.parallel_config.sequence_parallel
    experts = model.num_experts is not None
    chosen = model.num_experts_per_token if experts else 1
    into = 2 if experts and model.activation == "swiglu" else 1  # each matrix of an expert reduces its own
    each = 2.0 + (1 + into) * chosen + (1 if sequence and experts else 0)  # experts' tokens are gathered beside
    if config.training_config.recompute != "none":
        each += 1 + (chosen if experts else 0)
        each += 0.5 if sequence else 0
    return layers * each + (2 if config.parallel_config.pipeline_model_parallel_size == 1 else 1)


@functools.lru_cache(maxsize=4096)
def _apart(dp: int, tp: int, pp: int, ep: int, replicas: int, devices: int) -> bool:
    """True when every data-parallel group, the experts' too, holds each shard on different nodes, as the optimizer places them."""
    if replicas == 1 or dp == ep:
        return False
    model = tp * pp
    groups = [[first + rank * model for rank in range(dp)] for first in range(model)]
    if ep > 1:
        groups += [
            [first + (rank * ep + e) * model for rank in range(dp // ep)] for first in range(model) for e in range(ep)
        ]
    return all(ttp.replicas_apart([str(rank // devices) for rank in ranks], replicas) for ranks in groups)


def survived(plan: RunPlan, world_size: int) -> str:
    """Return what the layout survives, as text."""
    fewest = min(plan.replicas, plan.expert_replicas)
    if fewest == 1:
        return "a death loses the steps since the last checkpoint"
    text = f"any {fewest - 1} of {world_size} ranks"
    text += f", each of {plan.nodes} nodes" if plan.apart and plan.nodes > 1 else ""
    return text + ("" if plan.apart or plan.nodes == 1 else "; not each node: some holders of a shard share one")


def lines(plan: RunPlan, disk_bytes_per_s: float, world_size: int, limit: str | None = None) -> list[str]:
    """Return the plan for people. `limit`: a device's memory, as in 31GB."""
    axes = " x ".join(f"{name} {size}" for name, size in plan.axes.items() if name != "expert" or size > 1)
    replicas = f"{plan.replicas} ranks hold each shard" if plan.replicas > 1 else "no shard has a second holder"
    if plan.expert_replicas < plan.replicas:
        each = f"{plan.expert_replicas} ranks hold" if plan.expert_replicas > 1 else "one rank alone holds"
        replicas += f", but {each} those of an expert"
    fits = ""
    if limit is not None:
        over = plan.memory - memory_bytes(limit, "memory")
        fits = f": fits into {limit}" if over <= 0 else f": does not fit into {limit}, {gib(over)} too much"
    seconds = plan.dump / world_size / disk_bytes_per_s
    key = f"{'without' if plan.accumulation_shard else 'with'} gradient_accumulation_shard"
    if plan.shards == 1:
        gradients = sent = " (gradient_accumulation_shard has no effect here)" if plan.accumulation_shard else ""
    else:
        gradients = f" ({gib(plan.gradients_otherwise)} {key})"
        sent = f" ({gib(plan.data_parallel_wire_otherwise)} {key})"
    return [
        f"ranks               {world_size}: {axes}",
        f"parameters          {plan.parameters:,}, {plan.local_parameters:,} a rank",
        f"memory a rank       {gib(plan.memory)}{fits}",
        f"  weights           {gib(plan.weights)}",
        f"  gradients         {gib(plan.gradients)}{gradients}",
        f"  optimizer         {gib(plan.optimizer)}, {gib(plan.copies)} of it for the replicas",
        f"  activations       {gib(plan.activations)} (estimate; {_RECOMPUTED[plan.recompute]})",
        "sent by a rank a step",
        f"  data parallel     {gib(plan.data_parallel_wire)}{sent}",
        f"  tensor parallel   {gib(plan.tensor_wire)}",
        f"  pipeline          {gib(plan.pipeline_wire)}",
        f"  experts           {gib(plan.expert_wire)}",
        f"pipeline bubble     {plan.bubble:.1%} of the time that a rank computes",
        f"dying gasp          {gib(plan.dump)}, {gib(plan.dump // world_size)} a rank:"
        f" {seconds:.1f} s at {disk_bytes_per_s / 1e9:g} GB/s a rank",
        f"survived            {survived(plan, world_size)} ({replicas})",
    ]


def gib(nbytes: float) -> str:
    """Return a size as text; of a small model in smaller units."""
    if nbytes >= GIB / 10 or nbytes == 0:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 / 10 else f"{nbytes / 2**10:.2f} KiB"
