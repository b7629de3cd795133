"""What tensor-parallel ranks send each other is the least that their split needs, and what a plan says."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.conftest import MakeConfig
from ttp.trainer.model.gpt import token_loss
from ttp.trainer.parallel.mesh import build_mesh
from ttp.trainer.parallel.pipeline_stages import build_chunks
from ttp.trainer.plan.estimate import make_plan

CPU = torch.device("cpu")
SEQUENCE = {"parallel_config.sequence_parallel": True}
EXPERTS = {"model_config.num_experts": 2}
"""Both take every token, so that a rank's share is known."""
GATHERED = {"training_config.loss_func_kwargs.loss_func_type": "CrossEntropyLoss"}


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """The first of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of what is whole in each collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("_c10d_functional::").partition(".")[0]
        if name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            self.nbytes[name] += max(made.nbytes, args[0].nbytes)
        return made


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("keys", [{}, SEQUENCE, EXPERTS, {**EXPERTS, **SEQUENCE}, GATHERED], ids=str)
def test_a_plan_says_what_tensor_parallel_ranks_send(
    small_config: MakeConfig, keys: dict[str, Any], recompute: str
) -> None:
    """To the byte, forward and backward. Where queries, keys and values share their input, its gradient is added up once: five
    all-reduces each way for two layers and an end. Logits that are gathered are sent once, and their gradient is not."""
    tensor = {"parallel_config.tensor_model_parallel_size": 2, "training_config.recompute": recompute}
    config = small_config({**tensor, **keys})
    (model,) = build_chunks(config, build_mesh(config.parallel_config, 2, 0, "cpu"), CPU)
    tokens_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(5))
    splitting = contextlib.nullcontext if keys is GATHERED else loss_parallel
    with splitting(), Collectives() as forward:
        loss = token_loss(model(tokens_BT), tokens_BT)
    with splitting(), Collectives() as backward:
        torch.autograd.backward(loss)
    least = 2 * 16 * 32 * 4  # of a micro-batch's activations between two layers; the loss's own sums are less
    sent = 0.0
    for run in (forward, backward):
        sent += (
            run.nbytes["all_reduce"] + (run.nbytes["all_gather_into_tensor"] + run.nbytes["reduce_scatter_tensor"]) / 2
        )
    assert make_plan(config, 2).tensor_wire == pytest.approx(sent, abs=least / 16)
    if not keys and recompute == "none":
        assert sent == pytest.approx(10 * least, abs=least / 16)
