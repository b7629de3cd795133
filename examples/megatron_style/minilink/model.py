"""A small GPT, one stage of it on each rank, and the wrapper that gathers gradients in FP32 beside the parameters (`main_grad`).

Shapes: B samples, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from minilink import get_args
from minilink.core import parallel_state
from minilink.experts import SwitchMLP
from minilink.layers import MLP, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, parallel_logits


class Block(nn.Module):
    def __init__(self, hidden_size: int, heads: int, dropout: float, experts: int | None) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, groups=3)
        self.dense = RowParallelLinear(hidden_size, hidden_size)
        self.mlp = MLP(hidden_size) if experts is None else SwitchMLP(hidden_size, experts)
        self.head_size = hidden_size // heads
        self.dropout = dropout

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(part) for part in self.qkv(self.ln_1(x_BTD)).chunk(3, dim=-1))
        a_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + F.dropout(self.dense(a_BTD), self.dropout, self.training)
        return x_BTD + F.dropout(self.mlp(self.ln_2(x_BTD)), self.dropout, self.training)

    def _heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class GPTModel(nn.Module):
    """A chunk of this rank's stage: its layers, the embeddings on the model's first chunk, the output on its last one."""

    share_word_embeddings = True

    def __init__(self, chunk: int, chunks: int) -> None:
        """chunk: which one of the `chunks` of each stage (several: virtual pipeline parallelism)."""
        super().__init__()
        args = get_args()
        self.pre_process = parallel_state.is_pipeline_first_stage() and chunk == 0
        self.post_process = parallel_state.is_pipeline_last_stage() and chunk == chunks - 1
        if self.pre_process or self.post_process:
            torch.manual_seed(args.seed)
            self.word_embeddings = VocabParallelEmbedding(args.vocab_size, args.hidden_size)
        if not self.pre_process and self.post_process:
            self.word_embeddings.weight.shared = True  # type: ignore[attr-defined]
        if self.pre_process:
            torch.manual_seed(args.seed + 1)
            self.position_embeddings = nn.Embedding(args.seq_length, args.hidden_size)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        here = args.num_layers // (stages * chunks)
        first = (chunk * stages + parallel_state.get_pipeline_model_parallel_rank()) * here
        layers = []
        for number in range(first, first + here):
            torch.manual_seed(args.seed + 10 + number)
            layers.append(Block(args.hidden_size, args.num_attention_heads, args.hidden_dropout, args.num_experts))
        self.layers = nn.ModuleList(layers)
        if self.post_process:
            self.final_layernorm = nn.LayerNorm(args.hidden_size)
        for param in self.parameters():
            if not hasattr(param, "tensor_model_parallel"):
                param.tensor_model_parallel = False  # type: ignore[attr-defined]

    def word_embeddings_weight(self) -> nn.Parameter:
        return self.word_embeddings.weight

    def forward(self, tokens_BT: torch.Tensor, received_BTD: torch.Tensor | None) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it; before the last chunk: what the next one goes on from."""
        if received_BTD is None:
            x_BTD = self.word_embeddings(tokens_BT[:, :-1]) + self.position_embeddings.weight
        else:
            x_BTD = received_BTD
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        if not self.post_process:
            return x_BTD
        logits_BTV = parallel_logits(self.final_layernorm(x_BTD), self.word_embeddings_weight())
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
