"""A small GPT, and the wrapper that gathers gradients in FP32 beside the parameters (`main_grad`).

Shapes: B samples, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from minilink import get_args


class Block(nn.Module):
    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = dropout

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln_1(x_BTD)).chunk(3, dim=-1)
        a_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + F.dropout(self.dense(a_BTD), self.dropout, self.training)
        return x_BTD + F.dropout(self.down(F.gelu(self.up(self.ln_2(x_BTD)))), self.dropout, self.training)


class GPTModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        args = get_args()
        self.word_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.position_embeddings = nn.Embedding(args.seq_length, args.hidden_size)
        self.layers = nn.ModuleList([Block(args.hidden_size, args.hidden_dropout) for _ in range(args.num_layers)])
        self.final_layernorm = nn.LayerNorm(args.hidden_size)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it."""
        x_BTD = self.word_embeddings(tokens_BT[:, :-1]) + self.position_embeddings.weight
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV = self.final_layernorm(x_BTD) @ self.word_embeddings.weight.t()
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())

    def state_dict_for_save_checkpoint(self) -> dict[str, Any]:
        return self.state_dict()


class LocalDDP(nn.Module):
    """Adds every gradient to the parameter's `main_grad`; whoever updates reduces those."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for param in module.parameters():
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(self._add)

    @staticmethod
    def _add(param: torch.Tensor) -> None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None

    def zero_grad_buffer(self) -> None:
        for param in self.module.parameters():
            param.main_grad.zero_()  # type: ignore[attr-defined]

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)

    def state_dict_for_save_checkpoint(self) -> dict[str, Any]:
        return self.module.state_dict_for_save_checkpoint()
