"""What a configuration of the bundled trainer says of the run: how large a checkpoint is, and which deaths are survived.

Owns the reading of `--config`; all arithmetic is `--plan`'s. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttp.doctor.finding import FAILED, OK, WARNING, Finding
from ttp.errors import ConfigError
from ttp.text.wording import size_text
from ttp.trainer.config.loader import load_config, parse_overrides


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """What is known of the job."""

    finding: Finding
    save_dirs: tuple[str, ...] = ()
    device: str = ""
    dump_bytes: int = 0
    """0: not known."""


def read(name: str, overrides: Sequence[str], ranks: int, nodes: int) -> PlannedLayout:
    """Plan a configuration for so many ranks a node, on so many nodes. Raises ConfigError: the command line names none."""
    config = load_config(name, parse_overrides(overrides))
    training = config.training_config
    from ttp.trainer.plan.estimate import make_plan, survived  # torch takes a while

    world_size = ranks * nodes
    known = PlannedLayout(
        Finding("layout", OK, ""), training.save_dirs or (f"{training.output_dir}/checkpoints",), training.device
    )
    try:
        plan = make_plan(config, world_size, ranks)
    except ConfigError as error:
        finding = Finding(
            "layout",
            FAILED,
            str(error),
            f"a layout for {world_size} ranks",
            "Correct parallel_config, or the number of ranks",
        )
        return PlannedLayout(finding, known.save_dirs, known.device)
    text = survived(plan, world_size)
    found = f"{world_size} ranks, a checkpoint of {size_text(plan.dump)}; survived: {text}"
    figures = {"world_size": world_size, "dump_bytes": plan.dump, "replicas": min(plan.replicas, plan.expert_replicas)}
    status, expected, do = OK, "", ""
    if figures["replicas"] == 1:
        status, expected = WARNING, "two holders of each shard or more"
        do = "Use more data-parallel ranks or replicas, or copies in memory (docs/copies.md); or bound what is lost by save_interval"
    elif nodes > 1 and not plan.apart:
        status, expected = WARNING, "holders of each shard on different nodes"
        do = (
            "The loss of a node may lose the steps since the newest checkpoint: change the layout, or set save_interval"
        )
    return PlannedLayout(
        Finding("layout", status, found, expected, do, figures), known.save_dirs, known.device, plan.dump
    )
