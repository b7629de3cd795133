"""The model is the one that its configuration says, in every variant."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ttp.trainer.config.loader import load_config, presets
from ttp.trainer.config.schema import ModelConfig
from ttp.trainer.model.gpt import (
    GPT,
    Attention,
    Rotation,
    build_model,
    count_parameters,
    initialize,
    rotary_angles,
    rotate,
    token_loss,
)

CPU = torch.device("cpu")
VARIANTS = [
    {
        "position_embedding_type": position,
        "normalization": norm,
        "activation": activation,
        "group_query_attention": groups is not None,
        "num_query_groups": groups,
        "untie_embeddings_and_output_weights": untied,
        "use_bias": bias,
    }
    for position, norm, activation, groups, (untied, bias) in itertools.product(
        ("rope", "absolute"),
        ("RMSNorm", "LayerNorm"),
        ("swiglu", "gelu", "gelu_tanh"),
        (None, 1, 2),
        ((True, False), (False, True)),
    )
]


def model_of(config: ModelConfig, seed: int = 1, **changes: Any) -> GPT:
    return build_model(dataclasses.replace(config, **changes), seed, CPU).eval()


def embedding_of(model: GPT) -> torch.Tensor:
    assert model.embedding is not None
    return model.embedding.weight


@pytest.fixture
def tokens_BT() -> torch.Tensor:
    return torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_every_variant_has_logits_gradients_and_the_counted_weights(
    small_model: ModelConfig, tokens_BT: torch.Tensor, changes: dict[str, Any]
) -> None:
    """Each parameter gets a gradient; each is counted once; the untrained loss is near that of guessing."""
    model = model_of(small_model, **changes)
    logits_BTV = model(tokens_BT)
    assert logits_BTV.shape == (2, 16, 256)
    loss = token_loss(logits_BTV, tokens_BT.roll(1, dims=0))  # a tied head favours the token itself
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(5.545, abs=0.1)
    parameters = dict(model.named_parameters())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in parameters.values())
    assert count_parameters(model.config) == sum(p.numel() for p in parameters.values())
    assert ("output.weight" in parameters) == changes["untie_embeddings_and_output_weights"]


@pytest.mark.parametrize("position", ["rope", "absolute"])
def test_future_tokens_do_not_change_past_logits(
    small_model: ModelConfig, tokens_BT: torch.Tensor, position: str
) -> None:
    """Causality, at every position; and the past does change the future."""
    model = model_of(small_model, position_embedding_type=position)
    before_BTV = model(tokens_BT)
    for t in range(1, 16):
        other_BT = tokens_BT.clone()
        other_BT[:, t] = (other_BT[:, t] + 1) % 256
        after_BTV = model(other_BT)
        torch.testing.assert_close(after_BTV[:, :t], before_BTV[:, :t], rtol=0, atol=1e-6)
        assert not torch.equal(after_BTV[:, t:], before_BTV[:, t:])


def test_order_of_tokens_matters(small_model: ModelConfig) -> None:
    """Positions are seen: without them, the last logits of a permuted past would be equal."""
    for position in ("rope", "absolute"):
        model = model_of(small_model, position_embedding_type=position, init_std=0.3)
        first, second = model(torch.tensor([[1, 2, 3, 4]])), model(torch.tensor([[3, 1, 2, 4]]))
        assert (first[0, -1] - second[0, -1]).abs().max().item() > 1e-3


def test_grouped_attention_is_full_attention_with_repeated_heads(small_model: ModelConfig) -> None:
    """Query head h uses key and value head h // (H / K)."""
    grouped_config = dataclasses.replace(small_model, group_query_attention=True, num_query_groups=2)
    grouped, full = Attention(grouped_config), Attention(small_model)
    with torch.no_grad():
        full.wq.weight.copy_(grouped.wq.weight)
        full.wo.weight.copy_(grouped.wo.weight)
        for to, of in ((full.wk, grouped.wk), (full.wv, grouped.wv)):
            to.weight.copy_(of.weight.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32))
    x_BTD = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    rotation = rotary_angles(16, 8, 1e4, CPU)
    torch.testing.assert_close(grouped(x_BTD, rotation), full(x_BTD, rotation))


def test_attention_equals_the_formula(small_model: ModelConfig) -> None:
    """softmax(q k / sqrt(E) + mask) v, written out."""
    attention = Attention(small_model)
    x_TD = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    q_HTE, k_HTE, v_HTE = (
        F.linear(x_TD, w.weight).view(16, 4, 8).transpose(0, 1) for w in (attention.wq, attention.wk, attention.wv)
    )
    scores_HTT = q_HTE @ k_HTE.transpose(1, 2) / 8**0.5
    scores_HTT = scores_HTT.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -torch.inf)
    expected_TD = F.linear((scores_HTT.softmax(-1) @ v_HTE).transpose(0, 1).reshape(16, 32), attention.wo.weight)
    torch.testing.assert_close(attention(x_TD[None], None)[0], expected_TD)


def test_rope_depends_on_distance_alone() -> None:
    """Queries and keys moved together by any number of positions have the same products; rotation keeps lengths."""
    generator = torch.Generator().manual_seed(2)
    q_E, k_E = torch.randn(2, 64, generator=generator, dtype=torch.float32)

    def turned(x_E: torch.Tensor, position: int) -> torch.Tensor:
        rotation: Rotation = rotary_angles(1, 64, 1e4, CPU, first=position)
        return rotate(x_E.view(1, 1, 1, 64), rotation).flatten()

    for distance in (0, 1, 7, 100):
        products = [float(turned(q_E, p + distance) @ turned(k_E, p)) for p in (0, 1, 13, 200)]
        assert products == pytest.approx([products[0]] * 4, abs=1e-3)
    assert float(turned(q_E, 9) @ turned(k_E, 0)) != pytest.approx(float(turned(q_E, 0) @ turned(k_E, 0)), abs=1e-2)
    assert float(turned(q_E, 77).norm()) == pytest.approx(float(q_E.norm()), rel=1e-5)
    assert torch.equal(turned(q_E, 0), q_E)


def test_rope_keeps_the_type_and_computes_in_float32() -> None:
    """bfloat16 in, bfloat16 out; angles of late positions do not lose bits."""
    x = torch.randn(1, 1, 4, 8).bfloat16()
    rotation = rotary_angles(4, 8, 1e4, CPU, first=60_000)
    assert rotate(x, rotation).dtype == torch.bfloat16
    assert rotation[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_355m", 354_823_168),
        ("gpt2_774m", 774_030_080),
        ("gpt2_1.5b", 1_557_611_200),
        ("gpt_7b", 6_738_415_616),
        ("gpt_13b", 13_015_864_320),
        ("gpt_70b", 68_976_648_192),
        ("mixtral_8x7b", 46_702_792_704),
    ],
)
def test_parameter_counts_equal_the_published_ones(preset: str, published: int) -> None:
    """GPT-2 in its four sizes, LLaMA 7B and 13B, Llama 2 70B, Mixtral 8x7B."""
    assert count_parameters(load_config(preset).model_config) == published


@pytest.mark.parametrize(("preset", "billions"), [("gpt2_13b", 13), ("gpt2_52b", 52)])
def test_parameter_counts_that_were_published_in_billions(preset: str, billions: int) -> None:
    """GPT-3 13B's shape, and GPT-2 as wide as 8192."""
    assert round(count_parameters(load_config(preset).model_config) / 1e9) == billions


@pytest.mark.parametrize("preset", presets())
def test_counted_weights_are_the_built_ones(preset: str) -> None:
    """The formula against the modules."""
    config = load_config(preset).model_config
    with torch.device("meta"):
        built = sum(p.numel() for p in GPT(config).parameters())
    assert count_parameters(config) == built


def test_initial_weights_depend_on_seed_and_name_alone(small_model: ModelConfig) -> None:
    """Another order of registration, a deeper model or torch's own state change nothing."""
    torch.manual_seed(3)
    first = dict(model_of(small_model).named_parameters())
    torch.manual_seed(4)
    model = GPT(dataclasses.replace(small_model, num_layers=3, hidden_dropout=0.5))
    reversed_names = list(reversed(list(model.named_parameters())))
    setattr(model, "named_parameters", lambda: reversed_names)  # noqa: B010 - mypy forbids the plain assignment
    initialize(model, seed=1)
    for name, parameter in reversed_names:
        into_residual = name.endswith(("wo.weight", "down.weight"))  # their deviation depends on the depth
        if name in first and not into_residual:
            assert torch.equal(parameter, first[name]), name
    other = dict(model_of(small_model, seed=2).named_parameters())
    assert not torch.equal(first["layers.0.attention.wq.weight"], other["layers.0.attention.wq.weight"])
    assert not torch.equal(first["layers.0.attention.wq.weight"], first["layers.1.attention.wq.weight"])


def test_initial_weights_have_the_configured_spread(small_model: ModelConfig) -> None:
    """0.02, and 0.02 / sqrt(2 x layers) into the residual stream; norms one, biases zero; no dependence on the type."""
    model = model_of(small_model, hidden_size=256, use_bias=True, normalization="LayerNorm")
    parameters = dict(model.named_parameters())
    assert parameters["layers.0.attention.wq.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert parameters["layers.0.attention.wo.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert parameters["layers.1.feed_forward.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
    short = model_of(model.config, params_dtype="bfloat16", compute_dtype="bfloat16")
    assert torch.equal(embedding_of(short), embedding_of(model).bfloat16())


def test_tied_head_is_the_embedding_and_is_registered_once(small_model: ModelConfig, tokens_BT: torch.Tensor) -> None:
    """Both uses feed one gradient."""
    model = model_of(small_model, untie_embeddings_and_output_weights=False)
    assert [name for name, _ in model.named_parameters() if "output" in name] == []
    token_loss(model(tokens_BT), tokens_BT).backward()  # type: ignore[no-untyped-call]
    unseen = next(v for v in range(256) if v not in tokens_BT)
    gradient = embedding_of(model).grad
    assert gradient is not None
    assert bool(gradient[unseen].any())  # through the head alone


def test_dropout_acts_in_training_only(small_model: ModelConfig, tokens_BT: torch.Tensor) -> None:
    """Each of the two rates changes the training output, reproducibly by seed, and not the evaluation."""
    plain_BTV = model_of(small_model)(tokens_BT)
    for key in ("hidden_dropout", "attention_dropout"):
        model = build_model(dataclasses.replace(small_model, **{key: 0.5}), 1, CPU).eval()  # type: ignore[arg-type]
        assert torch.equal(model(tokens_BT), plain_BTV)
        model.train()
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            drawn.append(model(tokens_BT))
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        assert not torch.equal(drawn[0], plain_BTV)


def test_loss_is_computed_in_float32_and_is_the_cross_entropy(tokens_BT: torch.Tensor) -> None:
    """mean x tokens = sum; short logits are widened first."""
    logits_BTV = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    mean, total = token_loss(logits_BTV, tokens_BT), token_loss(logits_BTV, tokens_BT, "sum")
    assert mean.dtype == torch.float32
    log_p_BTV = logits_BTV.double().log_softmax(-1)
    expected = -log_p_BTV.gather(-1, tokens_BT[..., None]).mean()
    assert mean.item() == pytest.approx(expected.item(), rel=1e-5)
    assert total.item() == pytest.approx(32 * mean.item(), rel=1e-6)


@pytest.mark.parametrize("changes", [VARIANTS[0], VARIANTS[-1]], ids=["llama", "gpt2"])
def test_bfloat16_follows_float32(small_model: ModelConfig, tokens_BT: torch.Tensor, changes: dict[str, Any]) -> None:
    """Autocast over float32 parameters, and bfloat16 all through: the loss to 8 bits."""
    exact = token_loss(model_of(small_model, **changes)(tokens_BT), tokens_BT).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert token_loss(model_of(small_model, **changes)(tokens_BT), tokens_BT).item() == pytest.approx(
            exact, rel=4e-3
        )
    short = model_of(small_model, **changes, params_dtype="bfloat16", compute_dtype="bfloat16")
    assert token_loss(short(tokens_BT), tokens_BT).item() == pytest.approx(exact, rel=4e-3)
