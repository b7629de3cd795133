"""States with NaN or infinity: `ttp ckpt list` shows them, and `prune` leaves the newest one without."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console

from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.test_manifest import resealed
from ttp.checkpoint import find
from ttp.checkpoint.cli import main
from ttp.checkpoint.format import durable
from ttp.checkpoint.format.file_index import read_contents
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.write import write_share

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job

BAD: Mapping[str, float] = {"model.embed": math.nan, "optim.state.embed.exp_avg": math.inf}


def run(*words: object) -> tuple[int, str]:
    out = io.StringIO()
    status = main.main([*map(str, words)], Console(file=out, width=10_000))
    return status, out.getvalue()


def spoilt(job: Job, key: str) -> Job:
    """The same with one element that is not finite."""
    tensor = job.tensors[key].clone()
    tensor.view(-1)[-1] = BAD[key]
    return replace(job, tensors={**job.tensors, key: tensor})


def forget_finite(path: Path) -> None:
    """Make the manifest one of a version that did not look."""
    body = json.loads((path / "manifest.json").read_text())
    del body["finite"]
    (path / "manifest.json").write_bytes(resealed(body))


def column(text: str) -> dict[int, str]:
    """Return what the table says of each step."""
    rows = re.findall(r"^ *(\d+) +exited .* (yes|no|unknown) +(?:complete|part)", text, re.M)
    return {int(step): said for step, said in rows}


@pytest.mark.parametrize("key", BAD)
def test_the_list_says_of_each_state_whether_it_is_finite_and_names_the_newest_that_is(
    job: Job, tmp_path: Path, key: str
) -> None:
    """Whichever of the holders wrote the element, weights or optimizer state; an older manifest does not know."""
    forget_finite(job.save(tmp_path, 40))
    job.save(tmp_path, 41)
    status, text = run("list", tmp_path)
    assert status == 0 and column(text) == {40: "unknown", 41: "yes"} and "finite state is" not in text
    for step in (42, 43):
        spoilt(job, key).save(tmp_path, step)
    status, text = run("list", tmp_path)
    assert status == 0 and column(text) == {40: "unknown", 41: "yes", 42: "no", 43: "no"}
    assert "the newest checkpoint with a finite state is of step 41; move the newer ones away to resume it" in text
    answer = json.loads(run("list", tmp_path, "--json")[1])["checkpoints"]
    assert {entry["step"]: entry["finite"] for entry in answer} == {40: None, 41: True, 42: False, 43: False}
    assert find.newest_finite([str(tmp_path)], {}) == tmp_path / "iter_0000041"


def test_without_any_finite_state_the_list_says_so(job: Job, tmp_path: Path) -> None:
    forget_finite(job.save(tmp_path, 41))
    spoilt(job, "model.embed").save(tmp_path, 42)
    assert "the newest checkpoint with a finite state is not among these" in run("list", tmp_path)[1]
    assert find.newest_finite([str(tmp_path)], {}) is None


def test_the_newest_finite_one_of_several_directories_is_found_past_what_cannot_be_read(
    job: Job, tmp_path: Path
) -> None:
    """A broken manifest and a directory that is not there are passed over."""
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, step in ((first, 40), (second, 41)):
        job.save(folder, step)
    (job.save(first, 42) / "manifest.json").write_text("{")
    spoilt(job, "model.embed").save(second, 43)
    assert find.newest_finite([str(tmp_path / "none"), str(first), str(second)], {}) == second / "iter_0000041"
    passed_over = durable.inodes_in([str(second)])
    assert find.newest_finite([str(first), str(second)], passed_over) == first / "iter_0000040"


def steps(folder: Path) -> list[int]:
    return sorted(find.step_of(path) for path in find.list_checkpoints([folder]))


def test_prune_leaves_the_newest_finite_state_where_none_of_the_newest_is(job: Job, tmp_path: Path) -> None:
    """One that is only said to be finite and is broken does not count."""
    for step in (38, 39):
        job.save(tmp_path, step)
    broken = job.save(tmp_path, 40)
    content = bytearray((broken / "__0_0_0.distcp").read_bytes())
    content[len(content) // 3] ^= 4
    (broken / "__0_0_0.distcp").write_bytes(content)
    for step in (41, 42, 43):
        spoilt(job, "model.embed").save(tmp_path, step)
    assert run("prune", tmp_path, "--keep", 2, "--yes")[0] == 0
    assert steps(tmp_path) == [39, 40, 42, 43]
    job.save(tmp_path, 44)
    assert run("prune", tmp_path, "--keep", 2, "--yes")[0] == 0
    assert steps(tmp_path) == [43, 44], "one of those that stay is finite"


def test_prune_of_nodes_pieces_leaves_the_newest_finite_step_too(job: Job, tmp_path: Path) -> None:
    """The element is in one node's piece."""
    cluster = Cluster(tmp_path / "disks")
    for step in (10, 20):
        cluster.save(job, step)
    for step in (30, 40):
        cluster.save(spoilt(job, "model.embed"), step)
    disks = [cluster.root / "a", cluster.root / "b"]
    assert run("prune", *disks, "--keep", 1, "--yes")[0] == 0
    assert [steps(disk) for disk in disks] == [[20, 40], [20, 40]]


@pytest.mark.parametrize("number", [0, 1_999_999])
def test_every_element_of_a_large_tensor_is_looked_at(tmp_path: Path, number: int) -> None:
    """The answer is in the file's own table."""
    values = torch.zeros(2_000_000)
    name = "iter_0000042_tmp_a"
    for bad, expected in ((0.0, True), (math.nan, False)):
        values[number] = bad
        result = write_share(tmp_path, name, 0, [HeldTensor("model.w", (2_000_000,), 0, values)], {})
        assert read_contents(tmp_path / name, [result]).finite is expected
