"""A rank dies on the device of threads and the others keep running, with TTP_IN_PLACE=cuda. Its collectives do not raise: they are aborted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.device.test_jobs import HOSTILE, train, weights

ON = {"TTP_IN_PLACE": "cuda", "TTP_IN_PLACE_S": "30"}


def recovered(text: str, times: int = 1) -> None:
    """Demand that every fault ended in place."""
    assert len(re.findall("training continues after step", text)) == times, text
    assert "attempt 1" not in text and "is saved in" not in text.partition("done: 8 steps")[0].rpartition("step 8")[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a job of three ranks without a fault, on the mildest device."""
    return weights(train(tmp_path_factory.mktemp("whole") / "job", ranks=3))


def in_place(folder: Path, fault: str, *overrides: str, ranks: int = 3, gasp: str = "if_needed") -> str:
    """Return the weights of a job whose fault ends in place: on a device that leaves garbage where a collective was aborted, and on which one whose
    peer is gone never ends by itself. `gasp`: TTP_GASP; empty: as it is by itself there."""
    text = train(folder, fault, *overrides, ranks=ranks, environ=ON | ({"TTP_GASP": gasp} if gasp else {}), **HOSTILE)
    recovered(text)
    assert bool(re.search(r"saved +step [45] in", text)) is (gasp != "if_needed"), text
    return weights(text)


@pytest.mark.long
def test_a_killed_rank_is_replaced_on_a_device(tmp_path: Path, whole: str) -> None:
    """Gradients are on the wire: what their aborted sums leave is in no later step, in what lies between them neither. The step is on disk first,
    written beside collectives that never end."""
    assert in_place(tmp_path / "job", "kill:rank=0,step=5,point=backward", gasp="") == whole


@pytest.mark.long
def test_without_a_checkpoint(tmp_path: Path, whole: str) -> None:
    assert in_place(tmp_path / "job", "kill:rank=0,step=5,point=backward") == whole


@pytest.mark.long
@pytest.mark.parametrize("point", ["ready", "record", "updating", "done", "gathering"])
def test_at_every_point_of_a_step(point: str, tmp_path: Path, whole: str) -> None:
    assert in_place(tmp_path / "job", f"kill:rank=1,step=5,point={point}") == whole


@pytest.mark.long
@pytest.mark.parametrize("axes", [("--model_config.params_dtype=bfloat16", "--model_config.compute_dtype=bfloat16"), ("--dataset_config.micro_batch_num=2",
    "--training_config.gradient_accumulation_shard=True")])  # fmt: skip
@pytest.mark.parametrize("point", ["backward", "gathering"])
def test_with_other_memory(axes: tuple[str, ...], point: str, tmp_path: Path) -> None:
    """Masters apart from the parameters; gradients that are given back while they travel. Four ranks."""
    before = weights(train(tmp_path / "whole", "", *axes, ranks=4))
    assert in_place(tmp_path / "job", f"kill:rank=3,step=5,point={point}", *axes, ranks=4) == before


@pytest.mark.long
def test_an_exception_leaves_every_process_in_its_place(tmp_path: Path, whole: str) -> None:
    """No communicator has an error: only the abort of each rank's own brings it out."""
    assert in_place(tmp_path / "job", "raise:rank=1,step=5,point=ready") == whole


@pytest.mark.long
def test_an_abort_that_blocks_the_driver_costs_no_step(tmp_path: Path, whole: str) -> None:
    """What is written then was copied to the host before."""
    text = train(
        tmp_path / "job",
        "kill:rank=2,step=5,point=record",
        ranks=3,
        environ={"TTP_IN_PLACE": "cuda"},
        entry="tests.device.selftest_mutants:abort_blocks_the_driver",
    )
    assert "training continues after step" not in text and re.search(r"saved +step [45]\b", text), text
    assert weights(text) == whole


@pytest.mark.long
def test_without_the_setting_the_step_is_saved(tmp_path: Path) -> None:
    """An accelerator is asked for by name."""
    text = train(tmp_path / "job", "kill:rank=1,step=5,point=record", environ={"TTP_IN_PLACE": "True"})
    assert "training continues after step" not in text and re.search(r"saved +step [45]\b", text), text
