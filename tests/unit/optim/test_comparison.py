"""Replicas are distinguished by sums over their bits, and the difference is described."""

from __future__ import annotations

import random

import pytest
import torch

from ttp.optim.comparison import Divergence, differences, differing_shards, divergences
from ttp.optim.on_divergence import OnDivergence
from ttp.optim.shard_layout.layout import Layout, ParamSpec
from ttp.optim.sums import mixed, sums_of

LAYOUT = Layout.build([ParamSpec("w", (1000,)), ParamSpec("b", (10,))], 4)


def test_equal_sums_are_not_a_difference() -> None:
    assert differing_shards([[5], [6], [5], [6]], LAYOUT) == ()


def test_only_the_holders_of_a_shard_are_compared() -> None:
    assert differing_shards([[5], [6], [7], [6]], LAYOUT) == (0,)
    ring = Layout.build([ParamSpec("w", (1000,))], 3, ring=True)
    held = [ring.held(rank) for rank in range(3)]
    sums = [[10 * shard + (shard == 1 and rank == 1) for shard in held[rank]] for rank in range(3)]
    assert differing_shards(sums, ring) == (1,)


def test_the_tensor_and_its_holders_are_named() -> None:
    whole, altered = ("optim.state.w.exp_avg", 0, 512, 1), ("optim.state.w.exp_avg", 0, 512, 2)
    same = ("model.w", 0, 512, 9)
    reported = [{0: [same, whole]}, {}, {0: [same, altered]}, {}]
    (found,) = divergences(300, (0,), reported, LAYOUT)
    assert found == Divergence(300, "optim.state.w.exp_avg", 0, 512, ((0,), (2,)))
    said = differences([found])
    assert said.startswith("step 300: replicas differ in optim.state.w.exp_avg[0:512]: rank 0 against rank 2"), said


def test_where_a_difference_is_only_reported_the_checkpoint_from_before_it_is_named() -> None:
    choice = OnDivergence("report")
    assert "No comparison before found them equal: check these hosts" in choice.reported("what differs")
    choice.equal_after, choice.searched = 200, ("/a", "/b")
    assert choice.reported("step 300: replicas differ in w: rank 0 against rank 2").endswith(
        "They were equal after step 200: check these hosts, and go back to a checkpoint from before it (none was found in /a, /b)"
    )
    choice.checkpoint_before = lambda step: f"/a/iter_{step:07d}"
    assert choice.reported("what differs").endswith("check these hosts, and go back to /a/iter_0000200")


def test_a_long_list_is_cut_and_counted() -> None:
    found = [Divergence(1, f"k{i}", 0, 1, ((0, 1), (2,))) for i in range(9)]
    assert "k3[0:1] and 5 more: ranks 0, 1 against rank 2" in differences(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_any_one_altered_bit_alters_the_sum(dtype: torch.dtype) -> None:
    """At any place, chunk borders included; the seed is printed."""
    seed = random.SystemRandom().randrange(2**31)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(140_001, generator=generator) * 100).to(dtype)
    before = sums_of([values])
    raw = values.view(torch.uint8)
    for place in (0, 65_535, 65_536, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(40))):
        bit = 1 << rng.randrange(8)
        raw[place] ^= bit
        assert not torch.equal(sums_of([values]), before), f"seed {seed}, byte {place}, bit {bit}"
        raw[place] ^= bit
    assert torch.equal(sums_of([values]), before), f"seed {seed}"


def test_the_order_of_tensors_counts() -> None:
    one, two = torch.ones(3), torch.ones(4)
    assert not torch.equal(mixed(sums_of([one, two])), mixed(sums_of([two, one])))
