"""Layouts are proposed in the order of the stated time, all that a start would take and no others."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.unit.trainer.conftest import SMALL, MakeConfig
from ttp.errors import ConfigError
from ttp.trainer.__main__ import main
from ttp.trainer.config.schema import Config, ParallelConfig
from ttp.trainer.plan.estimate import RunPlan, gib, make_plan
from ttp.trainer.plan.search import Hardware, Recompute, best_of_each, order, search, step_seconds

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
AT = "parallel_config."
TINY = Hardware(devices_per_node=2, flops=1e9, node=1e8, network=1e7)


def by_trial(config: Config, world_size: int, sequences: int) -> dict[Config, RunPlan]:
    """Return the plan of every layout that the trainer's own checks accept, found by trying all."""
    found = {}
    sizes = range(1, world_size + 1)
    values = product(sizes, sizes, (1, 2, 4), (None, 2, 3, 4), (False, True), RECOMPUTE, (True, False))
    for tp, pp, ep, chunks, sequence, recompute, sharded in values:
        if world_size % (tp * pp) or (ep > 1 and not config.model_config.num_experts):
            continue
        micro, rest = divmod(sequences, 2 * (world_size // (tp * pp)))
        if rest or (not sharded and tp * pp == world_size):
            continue  # a lone rank's state is the same, sharded or not
        try:
            parallel = ParallelConfig(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                expert_model_parallel_size=ep,
                virtual_pipeline_model_parallel_size=chunks,
                sequence_parallel=sequence,
            )
            training = replace(config.training_config, recompute=recompute, use_distributed_optimizer=sharded)
            data = replace(config.dataset_config, micro_batch_num=micro)
            layout = replace(config, parallel_config=parallel, training_config=training, dataset_config=data)
            found[layout] = make_plan(layout, world_size, TINY.devices_per_node)
        except ConfigError:
            continue
    return found


@pytest.mark.parametrize(
    ("changes", "world_size", "sequences"), [({}, 4, 16), ({"model_config.num_experts": 4}, 4, 8), ({}, 6, 24)], ids=str
)
def test_the_proposals_are_all_layouts_that_a_start_would_take_best_first(
    small_config: MakeConfig, changes: dict[str, Any], world_size: int, sequences: int
) -> None:
    """Against every combination of the keys, tried one by one: the same layouts with the same plans, none left out, in the order of their
    time."""
    config = small_config({"model_config.num_layers": 4, **changes})
    found = search(config, world_size, TINY, sequences=sequences)
    tried = by_trial(config, world_size, sequences)
    assert len(tried) > 40 and {each.config: each.plan for each in found.proposals} == tried
    assert len(found.proposals) == len(tried)
    seconds = [each.seconds for each in found.proposals]
    assert seconds == sorted(seconds) == sorted(step_seconds(plan, TINY) for plan in tried.values())
    best = best_of_each(found.proposals)
    assert len({tuple(each.plan.axes.values()) for each in best}) == len(best)
    for each in found.proposals:
        first = next(other for other in best if other.plan.axes == each.plan.axes)
        assert order(first) <= order(each)


def test_a_limit_drops_what_needs_more_and_nothing_else(small_config: MakeConfig) -> None:
    """At the median of all; one that nothing keeps is refused with what the smallest needs."""
    config = small_config({"model_config.num_layers": 4})
    every = search(config, 4, TINY, sequences=16).proposals
    limit = sorted(each.plan.memory for each in every)[len(every) // 2]
    found = search(config, 4, TINY, memory=limit, sequences=16)
    assert found.proposals == tuple(each for each in every if each.plan.memory <= limit)
    assert found.too_large == len(every) - len(found.proposals) > 0
    least = min(each.plan.memory for each in every)
    assert search(config, 4, TINY, memory=least, sequences=16).proposals
    expected = f"the smallest of {len(every)} layouts needs {gib(least)} a rank, the limit is {gib(least - 1)}. Take"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        search(config, 4, TINY, memory=least - 1, sequences=16)


def test_a_steps_time_is_what_the_documentation_says(small_config: MakeConfig) -> None:
    """Operations with the bubble, and each axis' bytes at the rate of the widest link that it crosses."""
    keys = {f"{AT}tensor_model_parallel_size": 2, f"{AT}pipeline_model_parallel_size": 2}
    plan = make_plan(small_config({**keys, "dataset_config.micro_batch_num": 4}), 8)
    assert plan.bubble == 1 / 4 and min(plan.tensor_wire, plan.pipeline_wire, plan.data_parallel_wire) > 0
    slow, fast = plan.pipeline_wire + plan.data_parallel_wire, plan.tensor_wire
    assert step_seconds(plan, TINY) == pytest.approx(plan.flops / 1e9 * 1.25 + fast / 1e8 + slow / 1e7)
    wide = replace(TINY, devices_per_node=4)
    slow, fast = plan.data_parallel_wire, plan.tensor_wire + plan.pipeline_wire
    assert step_seconds(plan, wide) == pytest.approx(plan.flops / 1e9 * 1.25 + fast / 1e8 + slow / 1e7)
    alone = replace(TINY, devices_per_node=8)
    assert step_seconds(plan, alone) == pytest.approx(plan.flops / 1e9 * 1.25 + plan.sent / 1e8)


def test_virtual_stages_divide_the_bubble(small_config: MakeConfig) -> None:
    """(stages - 1) / (micro-batches x virtual stages): Narayanan et al. (2021), section 2.2.2."""
    keys = {"model_config.num_layers": 4, f"{AT}pipeline_model_parallel_size": 2, "dataset_config.micro_batch_num": 4}
    bubbles = [
        make_plan(small_config(keys | {f"{AT}virtual_pipeline_model_parallel_size": v}), 2).bubble for v in (None, 2)
    ]
    assert bubbles == [1 / 4, 1 / 8]


def test_the_step_stays_the_same_and_recomputation_costs(small_config: MakeConfig) -> None:
    """Every proposal takes the configuration's sequences; where memory has no limit nothing is recomputed."""
    config = small_config({"dataset_config.micro_batch_num": 4})
    found = search(config, 4, TINY)
    assert found.sequences == config.batch_size(4) == 32
    assert {each.config.batch_size(each.plan.axes["data"]) for each in found.proposals} == {32}
    assert {each.config.training_config.recompute for each in best_of_each(found.proposals)} == {"none"}
    with pytest.raises(ConfigError, match="none shares 7 sequences of a step, in micro-batches of 2"):
        search(config, 4, TINY, sequences=7)


def test_the_command_prints_a_table_and_the_best_ones_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints for number 1 is taken by --plan, which agrees on memory and bubble; so it is where the file says data_parallel."""
    small = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    small += ["--dataset_config.micro_batch_num", "8", "--model_config.num_layers", "4"]
    limits = ["--memory", "0.0006GB", "--top", "3", "--network-gb-per-s=0.1", "--devices-per-node", "2"]
    assert main([*small, "--plan", "--search", "--world-size", "8", *limits]) == 0
    output = capsys.readouterr().out
    assert re.match(
        r"8 ranks, 128 sequences a step: \d+ layouts; [1-9]\d* need more than 0.0006GB; the best of each", output
    )
    rows = re.findall(r"(?m)^[1-3] .*", output)
    assert len(rows) == 3 and "\n4 " not in output
    own = ["--training_config.max_device_memory=0.0006GB", "--plan", "--search", "--world-size", "8"]
    assert main([*small, *own, *limits[2:]]) == 0 and capsys.readouterr().out == output
    assert main([*small, *own, *limits[2:], "--memory=1GB"]) == 0
    assert "; 0 need more than 1GB; " in capsys.readouterr().out
    (line,) = re.findall(r"(?m)^number 1: (.*)", output)
    assert main([*small, *shlex.split(line), "--plan", "--world-size", "8", "--devices-per-node", "2"]) == 0
    plan = capsys.readouterr().out
    (memory,), (bubble,) = re.findall(r"memory a rank +(\S+ \S+)", plan), re.findall(r"bubble +(\S+)", plan)
    assert f" {memory} " in rows[0] and f" {bubble} " in rows[0]
    (axes,) = re.findall(r"data (\d+) x tensor (\d+) x pipeline (\d+)", plan)
    assert tuple(rows[0].split()[1:4]) == axes
    small += ["--parallel_config.data_parallel", "2", "--parallel_config.tensor_model_parallel_size", "4"]
    assert (
        main([*small, "--dataset_config.micro_batch_num=32", "--plan", "--search", "--world-size", "8", *limits]) == 0
    )
    (same,) = re.findall(r"(?m)^number 1: (.*)", capsys.readouterr().out)
    assert same == f"{line} --parallel_config.data_parallel {axes[0]}" and axes[0] != "2"
    assert main([*small, *shlex.split(same), "--plan", "--world-size", "8"]) == 0


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--world-size", "8", "--memory", "31"], "--memory: size: got '31', expected a size above 0 in GB"),
        (["--world-size", "8", "--top", "0"], "--top: got '0', expected an integer from 1"),
        (["--world-size", "999999"], "--world-size: got 999999, expected at most 100000 with --search"),
        (["--world-size", "12", "--parallel_config.tensor_model_parallel_size", "8"], "with --global-batch"),
    ],
)
def test_a_search_that_cannot_be_is_refused(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, status 2."""
    assert main(["--plan", "--search", *args]) == 2
    output = capsys.readouterr().err
    assert expected in output and output.count("\n") == 1
