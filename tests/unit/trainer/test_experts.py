"""A mixture of experts: each token goes where its router says, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.unit.trainer.conftest import MakeConfig
from ttp.trainer.config.schema import ModelConfig
from ttp.trainer.model.experts import Experts, balance_loss
from ttp.trainer.model.gpt import FeedForward, build_model, count_parameters
from ttp.trainer.parallel.mesh import Axis, Mesh
from ttp.trainer.parallel.pipeline_stages import build_chunks, experts_of

CPU = torch.device("cpu")


def mixture(config: ModelConfig, experts: int, chosen: int) -> Experts:
    torch.manual_seed(3)
    made = replace(config, num_experts=experts, num_experts_per_token=chosen)
    return Experts(made, range(experts), FeedForward)


@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 1), (4, 2), (5, 3)])
def test_each_token_is_the_weighted_sum_of_its_experts(small_model: ModelConfig, experts: int, chosen: int) -> None:
    """Token by token, with the weights of a softmax over the chosen scores."""
    layer = mixture(small_model, experts, chosen)
    x_BTD = torch.randn(2, 6, small_model.hidden_size)
    made = layer(x_BTD)
    for row, token in enumerate(x_BTD.flatten(0, 1)):
        best, which = layer.router(token).topk(chosen)
        weights = F.softmax(best, dim=-1)
        expected = sum(w * layer.experts[str(int(e))](token) for w, e in zip(weights, which, strict=True))
        torch.testing.assert_close(made.flatten(0, 1)[row], expected)


def test_an_expert_that_gets_no_token_has_a_gradient_of_zeros(small_model: ModelConfig) -> None:
    """Its parameters must arrive in backward like all others, or the buckets wait for them."""
    layer = mixture(small_model, 4, 1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    x_BTD = torch.rand(1, 5, small_model.hidden_size)
    torch.autograd.backward(layer(x_BTD).sum())
    for number, expert in layer.experts.items():
        for name, param in expert.named_parameters():
            assert param.grad is not None, (number, name)
            assert bool(param.grad.any()) == (number == "2"), (number, name)


def test_the_balance_loss_is_one_when_all_are_used_alike_and_grows_to_their_number() -> None:
    """Four experts: evenly 1, all tokens to one 4."""
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.arange(8).remainder(4).unsqueeze(1)).item() == pytest.approx(1.0)
    one = torch.zeros(8, 4)
    one[:, 1] = 1.0
    assert balance_loss(one, torch.ones(8, 1, dtype=torch.int64)).item() == pytest.approx(4.0)


def test_the_balance_loss_moves_the_router_and_nothing_of_the_output(small_model: ModelConfig) -> None:
    """In training it adds to the gradient what its own gradient is, times its weight; in evaluation nothing."""
    layer = mixture(small_model, 4, 2)
    x_BTD = torch.randn(2, 8, small_model.hidden_size)
    gradients = {}
    for weight in (0.0, 1.0, 3.0):
        layer.aux_weight = weight
        layer.zero_grad()
        torch.autograd.backward(layer(x_BTD).square().sum())
        assert layer.router.weight.grad is not None
        gradients[weight] = layer.router.weight.grad.clone()
    added = gradients[1.0] - gradients[0.0]
    assert bool(added.any())
    torch.testing.assert_close(gradients[3.0] - gradients[0.0], 3 * added, rtol=1e-3, atol=1e-6)
    trained = layer(x_BTD)
    assert torch.equal(layer.eval()(x_BTD), trained)


def test_experts_are_divided_in_order_and_keep_their_numbers(small_config: MakeConfig) -> None:
    """Rank 1 of 2 has the second half; its names and initial weights are those of the whole model."""
    keys = {"model_config.num_experts": 4, "parallel_config.expert_model_parallel_size": 2}
    config = small_config(keys)
    assert [list(experts_of(4, Axis(2, place))) for place in range(2)] == [[0, 1], [2, 3]]
    whole = dict(build_model(config.model_config, config.training_config.seed, CPU).named_parameters())
    (part,) = build_chunks(config, Mesh(expert=Axis(2, 1)), CPU)
    mine = dict(part.named_parameters())
    assert {name for name in mine if ".experts." in name} == {
        name for name in whole if ".experts.2." in name or ".experts.3." in name
    }
    assert all(torch.equal(param, whole[name]) for name, param in mine.items())


def test_the_parameters_of_experts_are_counted(small_model: ModelConfig) -> None:
    config = replace(small_model, num_experts=4, use_bias=True, normalization="LayerNorm")
    model = build_model(config, 1, CPU)
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
