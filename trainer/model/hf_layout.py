"""Models of Hugging Face `transformers` in our terms: the same architecture, weights under other names.

Owns what of GPT-2, Llama and Mixtral corresponds to what of ours, both ways: their `config.json` and their state dict.
Reads no file and imports nothing of theirs. What has no counterpart is refused by name, never left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ttp.errors import CheckpointMismatch, ConfigError
from ttp.inputs import checked

from ..config.schema import LARGEST, ModelConfig

FAMILIES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}
"""Their model types, and the class of each that has our output."""

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""What old files have beside weights; it follows from the configuration."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of theirs: ours one below the other (`ours`), transposed where their layer is a Conv1D."""

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False


def family_of(config: ModelConfig) -> str:
    """Return the model type that is this architecture. Raises ConfigError that says what stands in the way."""
    expected: dict[str, object]
    rope: dict[str, object] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "swiglu"}
    if config.position_embedding_type == "absolute":
        family, expected = "gpt2", {"normalization": "LayerNorm", "use_bias": True, "num_experts": None}
        if config.activation == "swiglu":
            expected["activation"] = "gelu or gelu_tanh"
        if config.kv_heads != config.num_attention_heads:
            expected["num_query_groups"] = None
        if config.head_size * config.num_attention_heads != config.hidden_size:
            expected["head_dim"] = None
    elif config.num_experts is None:
        family, expected = "llama", rope
    else:
        family, expected = "mixtral", rope | {"use_bias": False}
    differing = [f"{name} is {getattr(config, name)!r}, it has {value!r}" for name, value in expected.items()
                 if getattr(config, name) != value]  # fmt: skip
    if differing:
        raise ConfigError(
            f"model_config: no model of transformers is like this one; nearest is {family}: {'; '.join(differing)}"
        )
    return family


def to_hf_config(config: ModelConfig, dtype: str = "float32", end_of_text: int | None = None) -> dict[str, Any]:
    """Return the content of their config.json; `end_of_text`: the token at which they stop. Raises ConfigError for an architecture that they have not."""
    family = family_of(config)
    tied = not config.untie_embeddings_and_output_weights
    common: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_std,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
    }
    if family == "gpt2":
        activation = "gelu_new" if config.activation == "gelu_tanh" else "gelu"
        return common | {
            "n_positions": config.seq_length,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_attention_heads,
            "n_inner": config.ffn_size,
            "activation_function": activation,
            "resid_pdrop": config.hidden_dropout,
            "embd_pdrop": config.hidden_dropout,
            "attn_pdrop": config.attention_dropout,
            "layer_norm_epsilon": config.norm_eps,
        }
    described = common | {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary_base,  # read by transformers 4; by 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "attention_dropout": config.attention_dropout,
    }
    if family == "llama":
        return described | {"attention_bias": config.use_bias, "mlp_bias": config.use_bias}
    return described | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "sliding_window": None,
    }


def from_hf_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Return our configuration of their config.json. Raises ConfigError naming what we have no counterpart for."""
    family = theirs.get("model_type")
    if type(family) is not str or family not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type: got {checked.shown(family)}, expected one of {', '.join(FAMILIES)}"
        )
    _check_types(theirs)
    return _from_gpt2(theirs) if family == "gpt2" else _from_llama(theirs, family == "mixtral")


_INTEGERS = (
    "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "vocab_size", "num_hidden_layers", "hidden_size", "head_dim", "intermediate_size",
    "max_position_embeddings", "sliding_window", "num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
_NUMBERS = (
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "initializer_range", "rope_theta", "rms_norm_eps", "attention_dropout",
    "router_aux_loss_coef",
)  # fmt: skip

_MAY_BE_NULL = ("n_inner", "sliding_window", "head_dim", "num_key_value_heads", "attention_dropout")


def _check_types(theirs: Mapping[str, Any]) -> None:
    """Refuse what save_pretrained does not write, before it is reckoned with. Raises ConfigError."""
    try:
        for name in ("rope_parameters", "rope_scaling"):
            if theirs.get(name) is not None:
                rotation = checked.mapping(theirs[name], name)
                if "rope_theta" in rotation:
                    checked.number(rotation["rope_theta"], f"{name}.rope_theta")
        given = [name for name, value in theirs.items() if value is not None or name not in _MAY_BE_NULL]
        for name in given:
            if name in _INTEGERS:
                checked.integer(theirs[name], name, 1, LARGEST)
            elif name in _NUMBERS:
                checked.number(theirs[name], name)
    except checked.Invalid as error:
        raise ConfigError(f"config.json: {error}; copy it again from where it came") from None


def _from_gpt2(theirs: Mapping[str, Any]) -> ModelConfig:
    plain = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    for name, value in plain.items():
        _expect(theirs, name, (value,), value)
    _expect(theirs, "activation_function", tuple(_ACTIVATIONS), "gelu_new")
    dropout = theirs.get("resid_pdrop", 0.1)
    _expect(theirs, "embd_pdrop", (dropout,), 0.1)  # ours is one for both
    hidden = theirs.get("n_embd", 768)
    return ModelConfig(
        num_layers=theirs.get("n_layer", 12),
        hidden_size=hidden,
        num_attention_heads=theirs.get("n_head", 12),
        ffn_hidden_size=theirs.get("n_inner") or 4 * hidden,
        seq_length=theirs.get("n_positions", 1024),
        vocab_size=theirs.get("vocab_size", 50257),
        position_embedding_type="absolute",
        normalization="LayerNorm",
        norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
        activation="gelu" if theirs.get("activation_function") == "gelu" else "gelu_tanh",
        use_bias=True,
        untie_embeddings_and_output_weights=not theirs.get("tie_word_embeddings", True),
        hidden_dropout=float(dropout),
        attention_dropout=float(theirs.get("attn_pdrop", 0.1)),
        init_std=theirs.get("initializer_range", 0.02),
    )


def _from_llama(theirs: Mapping[str, Any], mixture: bool) -> ModelConfig:
    _expect(theirs, "hidden_act", ("silu",), "silu")
    _expect(theirs, "pretraining_tp", (1, None), 1)
    if mixture:
        _expect(theirs, "router_jitter_noise", (0, None), 0)
    length = theirs.get("max_position_embeddings", 4096 * 32 if mixture else 2048)
    window = theirs.get("sliding_window")
    if window is not None and window < length:
        raise ConfigError(f"config.json: sliding_window: got {window}, expected null, or {length} or more")
    rotation = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: the rope_type: got {checked.shown(kind)}, expected default, without scaling")
    for place in (theirs, rotation):  # of transformers 4 and 5
        _expect(place, "partial_rotary_factor", (1, None), 1)
    heads = theirs.get("num_attention_heads", 32)
    groups = theirs.get("num_key_value_heads") or (8 if mixture and "num_key_value_heads" not in theirs else heads)
    experts: dict[str, Any] = {}
    if mixture:
        experts = {
            "num_experts": theirs.get("num_local_experts", 8),
            "num_experts_per_token": theirs.get("num_experts_per_tok", 2),
            "router_aux_loss_coef": float(theirs.get("router_aux_loss_coef", 0.001)),
        }
    hidden, size = theirs.get("hidden_size", 4096), theirs.get("head_dim")
    return ModelConfig(
        num_layers=theirs.get("num_hidden_layers", 32),
        hidden_size=hidden,
        num_attention_heads=heads,
        head_dim=None if size is None or size * heads == hidden else size,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else None,
        ffn_hidden_size=theirs.get("intermediate_size", 14336 if mixture else 11008),
        seq_length=length,
        vocab_size=theirs.get("vocab_size", 32000),
        rotary_base=float(rotation.get("rope_theta", theirs.get("rope_theta", 1e6 if mixture else 1e4))),
        norm_eps=theirs.get("rms_norm_eps", 1e-5 if mixture else 1e-6),
        use_bias=bool(theirs.get("attention_bias") or theirs.get("mlp_bias")),
        untie_embeddings_and_output_weights=not theirs.get("tie_word_embeddings", False),
        attention_dropout=float(theirs.get("attention_dropout") or 0.0),
        init_std=theirs.get("initializer_range", 0.02),
        **experts,
    )


def _expect(theirs: Mapping[str, Any], name: str, expected: tuple[Any, ...], default: Any) -> None:
    value = theirs.get(name, default)
    if value not in expected:
        raise ConfigError(
            f"config.json: {name}: got {checked.shown(value)}, expected {' or '.join(map(repr, expected))}"
        )


# --- weights ---


def to_hf(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return whole weights by our names under theirs. Raises CheckpointMismatch when one is missing or too much."""
    left, theirs = dict(weights), {}
    for row in rows(config):
        parts = [_take(left, name, "the checkpoint") for name in row.ours]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        theirs[row.theirs] = (whole.t() if row.transposed else whole).contiguous()
    _none_left(left, "the checkpoint")
    return theirs


def from_hf(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return whole weights by their names under ours. Takes files of transformers 4 and 5 and its state dicts; biases that they
    have not are zero. Raises CheckpointMismatch when a weight is missing, too much, or of another shape."""
    left = _separate(weights, config)
    ours: dict[str, torch.Tensor] = {}
    for row in rows(config):
        if row.theirs not in left and row.theirs.endswith(".bias") and config.normalization == "RMSNorm":
            ours |= {name: _zero_bias(name, ours) for name in row.ours}
            continue
        whole = _take(left, row.theirs, "their model")
        whole = whole.t() if row.transposed else whole
        parts = whole.chunk(len(row.ours))
        ours |= {name: part.contiguous() for name, part in zip(row.ours, parts, strict=True)}
    if not config.untie_embeddings_and_output_weights:
        left.pop("lm_head.weight", None)
    _none_left(left, "their model")
    return ours


def rows(config: ModelConfig) -> Iterator[TensorRow]:
    """Yield every tensor of theirs for a model like this. Raises ConfigError for an architecture that they have not."""
    family = family_of(config)
    if family == "gpt2":
        yield TensorRow(("embedding.weight",), "transformer.wte.weight")
        yield TensorRow(("positions.weight",), "transformer.wpe.weight")
        yield from (TensorRow((f"norm.{kind}",), f"transformer.ln_f.{kind}") for kind in ("weight", "bias"))
    else:
        yield TensorRow(("embedding.weight",), "model.embed_tokens.weight")
        yield TensorRow(("norm.weight",), "model.norm.weight")
    if config.untie_embeddings_and_output_weights:
        yield TensorRow(("output.weight",), "lm_head.weight")
    for number in range(config.num_layers):
        yield from _gpt2_layer(number) if family == "gpt2" else _llama_layer(number, config)


def _gpt2_layer(number: int) -> Iterator[TensorRow]:
    ours, theirs = f"layers.{number}.", f"transformer.h.{number}."
    for kind in ("weight", "bias"):
        matrix = kind == "weight"
        yield TensorRow((f"{ours}attention_norm.{kind}",), f"{theirs}ln_1.{kind}")
        yield TensorRow((f"{ours}feed_forward_norm.{kind}",), f"{theirs}ln_2.{kind}")
        yield TensorRow(
            tuple(f"{ours}attention.{name}.{kind}" for name in ("wq", "wk", "wv")),
            f"{theirs}attn.c_attn.{kind}",
            matrix,
        )
        yield TensorRow((f"{ours}attention.wo.{kind}",), f"{theirs}attn.c_proj.{kind}", matrix)
        yield TensorRow((f"{ours}feed_forward.up.{kind}",), f"{theirs}mlp.c_fc.{kind}", matrix)
        yield TensorRow((f"{ours}feed_forward.down.{kind}",), f"{theirs}mlp.c_proj.{kind}", matrix)


def _llama_layer(number: int, config: ModelConfig) -> Iterator[TensorRow]:
    ours, theirs = f"layers.{number}.", f"model.layers.{number}."
    yield TensorRow((f"{ours}attention_norm.weight",), f"{theirs}input_layernorm.weight")
    yield TensorRow((f"{ours}feed_forward_norm.weight",), f"{theirs}post_attention_layernorm.weight")
    matrices = {f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    if config.num_experts is None:
        matrices |= {f"feed_forward.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    else:
        matrices["feed_forward.router"] = "block_sparse_moe.gate"
        for expert in range(config.num_experts):
            for name, short in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                matrices[f"feed_forward.experts.{expert}.{name}"] = f"block_sparse_moe.experts.{expert}.{short}"
    for kind in ("weight", "bias") if config.use_bias else ("weight",):
        for mine, other in matrices.items():
            yield TensorRow((f"{ours}{mine}.{kind}",), f"{theirs}{other}.{kind}")


def _separate(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return their weights by the names of their files: without buffers, with the model's prefix, each expert by itself."""
    prefix = "transformer." if config.position_embedding_type == "absolute" else "model."
    found: dict[str, torch.Tensor] = {}
    for given, tensor in weights.items():
        name = given if given.startswith((prefix, "lm_head.")) else prefix + given
        if name.endswith(_BUFFERS):
            continue
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if config.num_experts else name
        at = name.rpartition(".mlp.experts.")[0] + ".block_sparse_moe.experts."
        if name.endswith(".mlp.experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                found[f"{at}{expert}.w1.weight"], found[f"{at}{expert}.w3.weight"] = both.chunk(2)
        elif name.endswith(".mlp.experts.down_proj"):
            found |= {f"{at}{expert}.w2.weight": one for expert, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def _zero_bias(name: str, ours: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weight = ours[name.removesuffix("bias") + "weight"]
    return weight.new_zeros(weight.shape[0])


def _take(left: dict[str, torch.Tensor], name: str, whose: str) -> torch.Tensor:
    if name not in left:
        raise CheckpointMismatch(f"{whose} has no {name!r}: the configuration beside it is of another model")
    return left.pop(name)


def _none_left(left: Mapping[str, torch.Tensor], whose: str) -> None:
    if left:
        raise CheckpointMismatch(
            f"{whose} has weights that this architecture has not: {', '.join(sorted(left)[:5])}; their configuration is of"
            " another model"
        )
