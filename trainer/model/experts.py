"""Mixture of experts: each token goes to the few feed-forwards that a router chooses for it.

Owns the routing, its balance, and the way of tokens to experts on other ranks and back. A rank that has all experts sends
nothing. Source: Shazeer et al., Outrageously Large Neural Networks (2017); Fedus et al., Switch Transformers (2021), section
2.2; Jiang et al., Mixtral of Experts (2024), section 2.1.

Shape suffixes: N tokens of a micro-batch, K experts of a token, D hidden size, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..config.schema import ModelConfig


class Experts(nn.Module):
    """x_BTD -> x_BTD: the weighted sum of each token's chosen experts.

    `here`: numbers of the experts that this rank has; `build(config)` makes one.
    """

    def __init__(self, config: ModelConfig, here: Sequence[int], build: Callable[[ModelConfig], nn.Module]) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.count, self.chosen = config.num_experts, config.num_experts_per_token
        # A token counts once for each of its experts, and the model's balance is the mean of its layers'.
        self.balance = config.router_aux_loss_coef * self.chosen / config.num_layers
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleDict({str(number): build(config) for number in here})
        self.group: Any = None
        """The process group whose ranks have the experts among them, in the order of their numbers; None: all are here."""
        self.aux_weight = 1.0
        """What the balance loss is multiplied by beside its coefficient: the loss scale, and the tokens where losses are summed."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        tokens_ND = x_BTD.flatten(0, 1)
        scores_NX = self.router(tokens_ND).float()
        best_NK, chosen_NK = scores_NX.topk(self.chosen, dim=-1)
        weights_NK = F.softmax(best_NK, dim=-1)
        if self.training and self.balance:
            aux = balance_loss(F.softmax(scores_NX, dim=-1), chosen_NK) * (self.balance * self.aux_weight)
            tokens_ND = cast(torch.Tensor, _WithLoss.apply(tokens_ND, aux))  # type: ignore[no-untyped-call]
        # Stable, so that a restart adds up in the same order.
        order = chosen_NK.flatten().argsort(stable=True)
        token_of = order // self.chosen
        counts = torch.bincount(chosen_NK.flatten(), minlength=self.count)
        done = self._through_experts(tokens_ND[token_of], counts)
        weighted = done * weights_NK.flatten()[order].unsqueeze(-1).to(done.dtype)
        out_ND = torch.zeros_like(tokens_ND, dtype=weighted.dtype).index_add(0, token_of, weighted)
        return out_ND.to(x_BTD.dtype).view_as(x_BTD)

    def _through_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """rows: tokens sorted by expert, `counts[x]` for expert x. Returns what the experts made of them, in the same order."""
        if self.group is None:
            return self._run(rows, counts.tolist())
        ranks = dist.get_world_size(self.group)
        sent = counts.view(ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        give, take = sent.sum(1).tolist(), received.sum(1).tolist()
        mine = exchange(rows, give, take, self.group)
        # What came is sorted by sender, then expert; the experts want it sorted by expert.
        per_sender = received.flatten().tolist()
        blocks = list(torch.split(mine, per_sender))
        experts = len(self.experts)
        by_expert = [block for e in range(experts) for block in blocks[e::experts]]
        made = self._run(torch.cat(by_expert), received.sum(0).tolist())
        sizes = [block.shape[0] for block in by_expert]
        parts = list(torch.split(made, sizes))
        back = [parts[e * ranks + sender] for sender in range(ranks) for e in range(experts)]
        return exchange(torch.cat(back), take, give, self.group)

    def _run(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Run each local expert on its rows. One that gets none runs on none: its parameters get a gradient of zeros."""
        done = [
            expert(part) for expert, part in zip(self.experts.values(), torch.split(rows, list(counts)), strict=True)
        ]
        return torch.cat(done)


def balance_loss(probabilities_NX: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    """Return X times the sum over experts of (share of tokens) x (mean probability): 1 when all are used alike.

    Source: Fedus et al. (2021), equation 4, with the K choices of a token counted alike.
    """
    experts = probabilities_NX.shape[-1]
    share_X = torch.bincount(chosen_NK.flatten(), minlength=experts) / chosen_NK.numel()
    return experts * (share_X * probabilities_NX.mean(0)).sum()


class _WithLoss(torch.autograd.Function):
    """Passes a tensor on unchanged, and lets backward begin at `loss` as well: a pipeline's stage in the middle of the model has
    no other place to add it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss_like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones_like(ctx.loss_like)


def exchange(rows: torch.Tensor, give: Sequence[int], take: Sequence[int], group: Any) -> torch.Tensor:
    """Send `give[r]` consecutive rows to each rank of the group and return the `take[r]` rows that came from each."""
    return cast(torch.Tensor, _Exchange.apply(rows, list(give), list(take), group))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, give: list[int], take: list[int], group: Any) -> torch.Tensor:
        ctx.give, ctx.take, ctx.group = give, take, group
        return _all_to_all(rows, give, take, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.take, ctx.give, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, give: list[int], take: list[int], group: Any) -> torch.Tensor:
    received = rows.new_empty(sum(take), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), take, give, group=group)
    return received
