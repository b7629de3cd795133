"""The same weights give the same logits, the same loss and the same gradients, here and in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.parity.conftest import SHAPES, MakeTheirs
from ttp.trainer.config.schema import ModelConfig
from ttp.trainer.model.experts import Experts, balance_loss
from ttp.trainer.model.gpt import GPT, count_parameters, token_loss
from ttp.trainer.model.hf_layout import from_hf, from_hf_config, to_hf, to_hf_config
from ttp.trainer.model.weights import model_of

CPU = torch.device("cpu")


def ours_of(theirs: Any) -> tuple[ModelConfig, GPT]:
    config = from_hf_config(theirs.config.to_dict())
    return config, model_of(config, from_hf(theirs.state_dict(), config), CPU, "theirs")


def tokens_of(config: ModelConfig, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab_size, (rows, config.seq_length), generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_weights_give_the_same_logits_and_loss(make_theirs: MakeTheirs, shape: str) -> None:
    """To FP32 round-off: at most 2e-5 of the largest logit, and 1e-5 of the loss."""
    theirs = make_theirs(shape)
    config, ours = ours_of(theirs)
    tokens_BT = tokens_of(config)
    with torch.no_grad():
        expected = theirs(tokens_BT, labels=tokens_BT)
        logits_BTV = ours(tokens_BT)
    assert expected.logits.abs().max() > 0.5
    torch.testing.assert_close(logits_BTV, expected.logits, rtol=0, atol=2e-5 * float(expected.logits.abs().max()))
    loss = token_loss(logits_BTV[:, :-1], tokens_BT[:, 1:])
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert count_parameters(config) == sum(parameter.numel() for parameter in ours.parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_weights_give_the_same_gradients(make_theirs: MakeTheirs, shape: str) -> None:
    """Of every tensor, under their names; so the same training."""
    theirs = make_theirs(shape)
    config, ours = ours_of(theirs)
    tokens_BT = tokens_of(config)
    torch.autograd.backward(theirs(tokens_BT, labels=tokens_BT).loss)
    torch.autograd.backward(token_loss(ours(tokens_BT)[:, :-1], tokens_BT[:, 1:]))
    found = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    expected = from_hf({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, config)
    assert_gradients(found, expected)


def assert_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        if name.endswith("bias") and not bool(gradient.any()):
            continue  # a bias that they have not
        difference = float((found[name] - gradient).abs().max())
        assert difference <= 2e-5 * largest, (name, difference, largest)


@pytest.mark.parametrize("shape", SHAPES)
def test_export_is_the_import_backwards(make_theirs: MakeTheirs, shape: str) -> None:
    """Their files' weights, each bit, from ours; and a configuration that gives our own again."""
    theirs = make_theirs(shape)
    config, _ = ours_of(theirs)
    weights = from_hf(theirs.state_dict(), config)
    exported = to_hf(weights, config)
    again = from_hf(exported, from_hf_config(to_hf_config(config)))
    assert from_hf_config(to_hf_config(config)) == config
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_the_balance_loss_of_one_layer_is_theirs(make_theirs: MakeTheirs) -> None:
    """With its weight in the loss: the same gradient of every weight, the router's above all."""
    theirs = make_theirs("mixtral", num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.5).train()
    config, ours = ours_of(theirs)
    ours.train()
    tokens_BT = tokens_of(config)
    made = theirs(tokens_BT, labels=tokens_BT)
    assert float(made.aux_loss.detach()) > 0
    torch.autograd.backward(made.loss)
    torch.autograd.backward(token_loss(ours(tokens_BT)[:, :-1], tokens_BT[:, 1:]))
    found = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    expected = from_hf({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, config)
    assert_gradients(found, expected)


def test_the_balance_loss_of_several_layers_is_the_mean_of_theirs() -> None:
    """They average the layers' shares before they multiply, which the stages of a pipeline cannot; we afterwards."""
    generator = torch.Generator().manual_seed(3)
    layers = tuple(torch.randn(20, 6, generator=generator) for _ in range(3))
    each = [float(load_balancing_loss_func((logits,), 6, 2)) for logits in layers]
    ours = [2 * float(balance_loss(logits.softmax(-1), logits.topk(2, dim=-1).indices)) for logits in layers]
    assert ours == pytest.approx(each, rel=1e-5)
    config = ModelConfig(num_layers=3, hidden_size=16, num_attention_heads=2, num_experts=6, router_aux_loss_coef=0.3)
    (weight, *others) = (m.balance for m in GPT(config).modules() if isinstance(m, Experts))
    assert [weight, *others] == pytest.approx([0.3 * 2 / 3] * 3)
