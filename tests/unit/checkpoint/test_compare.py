"""`ttp ckpt diff`: every kind of difference is found, at its name and position, whatever the layouts that wrote both."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from ttp.checkpoint import compare
from ttp.checkpoint.cli import main
from ttp.checkpoint.compare import differing

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job

BLOBS = {"optim.param_groups.0.lr": 0.1, "optim.param_groups.0.betas": (0.9, 0.95)}


def diff(a: Path, b: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Return status, text and JSON of one comparison."""
    texts = []
    for form in ((), ("--json",)):
        out = io.StringIO()
        status = main.main(["diff", str(a), str(b), *options, *form], Console(file=out, width=10_000))
        texts.append(out.getvalue())
    return status, texts[0], json.loads(texts[1])


def changed(job: Job, key: str, flat: int, value: float | torch.Tensor) -> Job:
    """Return the job with one element of one tensor replaced."""
    tensors = {name: tensor.clone() for name, tensor in job.tensors.items()}
    tensors[key].view(-1)[flat] = value
    return type(job)(tensors)


def test_the_same_state_by_another_number_of_ranks_is_equal(job: Job, tmp_path: Path) -> None:
    """Every kind of tensor there is: scalars, empty ones, half precision, booleans; the layout does not count."""
    a, b = job.save(tmp_path / "a", 42, holders=3, blobs=BLOBS), job.save(tmp_path / "b", 42, holders=5, blobs=BLOBS)
    status, text, reported = diff(a, b)
    assert status == 0 and "EQUAL" in text and reported["equal"] and reported["differences"] == []
    assert re.search(r"^layout\.dp +3 +5 *$", text, re.MULTILINE), "what differs in the layouts is shown"
    assert sum(kind["elements"] for kind in reported["kinds"].values()) == sum(t.numel() for t in job.tensors.values())
    assert reported["kinds"]["plain values"]["names"] == len(BLOBS) + 2  # and the host state


def test_the_first_difference_is_named_with_its_position_in_weights_and_in_optimizer_state(
    job: Job, tmp_path: Path
) -> None:
    """Both values, how many elements differ, and by how much at most."""
    other = changed(changed(job, "model.layers.0.w", 5 * 21 - 1, 3.5), "model.layers.0.w", 1 * 21 + 2 * 3 + 1, 9.0)
    other = changed(other, "optim.state.embed.exp_avg", 2 * 6 + 5, -1.0)
    status, text, reported = diff(job.save(tmp_path / "a", 42), other.save(tmp_path / "b", 42, holders=4))
    assert status == 1 and reported["equal"] is False
    weights, moments = reported["kinds"]["weights"], reported["kinds"]["optimizer state"]
    assert (weights["differing_names"], weights["differing_elements"]) == (1, 2)
    assert weights["first"]["name"] == "model.layers.0.w" and weights["first"]["position"] == [1, 2, 1]
    mine = job.tensors["model.layers.0.w"]
    assert (float(weights["first"]["a"]), float(weights["first"]["b"])) == (mine[1, 2, 1].item(), 9.0)
    assert weights["first"]["largest"] == max(abs(9.0 - mine[1, 2, 1].item()), abs(3.5 - mine[4, 6, 2].item()))
    assert moments["first"]["name"] == "optim.state.embed.exp_avg" and moments["first"]["position"] == [2, 5]
    assert f"first of weights: model.layers.0.w[1, 2, 1] is {mine[1, 2, 1].item()} in A, 9.0 in B" in text
    assert "first of optimizer state: optim.state.embed.exp_avg[2, 5] is" in text and "DIFFERENT: 2 of" in text


def test_windows_find_the_same_as_the_whole(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than a window is counted whole, and the position is the tensor's."""
    other = changed(changed(job, "model.embed", 7, 1.0), "model.embed", 77, 2.0)
    a, b = job.save(tmp_path / "a", 42), other.save(tmp_path / "b", 42)
    whole = diff(a, b)[2]
    monkeypatch.setattr(compare, "WINDOW_ELEMENTS", 5)
    assert diff(a, b)[2] == whole and whole["kinds"]["weights"]["first"]["position"] == [1, 1]


def test_bits_are_compared_and_not_numbers() -> None:
    """A NaN equals itself, minus zero is not zero, and one kind of NaN is not another."""
    nan, other_nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    one = torch.stack([nan, torch.tensor(0.0), nan, torch.tensor(1.0)])
    other = torch.stack([nan, torch.tensor(-0.0), other_nan, torch.tensor(1.0)])
    assert differing(one, other).tolist() == [1, 2]
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.complex128):
        some = torch.ones(5).to(dtype)
        changed_one = some.clone()
        changed_one[3] = 0
        assert differing(some, some.clone()).tolist() == [] and differing(some, changed_one).tolist() == [3], dtype


def test_elements_that_read_the_same_are_reported_by_their_bits(job: Job, tmp_path: Path) -> None:
    """Two kinds of NaN."""
    kinds = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    a, b = (changed(job, "model.embed", 3, value).save(tmp_path / str(i), 42) for i, value in enumerate(kinds))
    first = diff(a, b)[2]["kinds"]["weights"]["first"]
    assert (first["a"], first["b"]) == ("nan (bits 7fc00000)", "nan (bits 7fc00001)") and first["largest"] is None


def test_missing_names_other_shapes_and_types_are_differences(job: Job, tmp_path: Path) -> None:
    """Named with what stands on each side, and the rest is compared all the same."""
    tensors = dict(job.tensors)
    del tensors["model.norm"]
    tensors["model.embed"] = tensors["model.embed"][:12]
    tensors["model.half"] = tensors["model.half"].float()
    tensors["model.extra"] = torch.ones(2)
    a, b = job.save(tmp_path / "a", 42), type(job)(tensors).save(tmp_path / "b", 42)
    status, _, reported = diff(a, b)
    found = {each["name"]: (each["a"], each["b"], each["position"]) for each in reported["differences"]}
    assert status == 1 and found == {
        "model.embed": ("float32 [13, 6]", "float32 [12, 6]", None),
        "model.extra": ("not there", "float32 [2]", None),
        "model.half": ("bfloat16 [31]", "float32 [31]", None),
        "model.norm": ("float32 [1, 1, 9]", "not there", None),
    }


def test_plain_values_count(job: Job, tmp_path: Path) -> None:
    """A learning rate and the data position are part of what is trained on."""
    a = job.save(tmp_path / "a", 42, blobs=BLOBS)
    state = {"optimizer": {"param_groups": []}, "trainer": {"samples": 7}}
    b = job.save(tmp_path / "b", 42, blobs=BLOBS | {"optim.param_groups.0.lr": 0.2}, state=state)
    status, text, reported = diff(a, b)
    assert status == 1 and [each["name"] for each in reported["differences"]] == [
        "optim.param_groups.0.lr",
        "state.trainer.samples",
    ]
    assert "first of plain values: optim.param_groups.0.lr is 0.1 in A, 0.2 in B" in text


def test_layers_come_in_the_order_of_their_numbers(job: Job, tmp_path: Path) -> None:
    """Layer 2 is before layer 10, and --limit shows the first ones only, with how many more."""
    names = [f"model.layers.{i}.w" for i in (2, 10, 11)]
    first = type(job)({name: torch.zeros(3) for name in names})
    a, b = first.save(tmp_path / "a", 1), first.later().save(tmp_path / "b", 1)
    _, text, reported = diff(a, b, "--limit", "1")
    assert [each["name"] for each in reported["differences"]] == names
    assert "model.layers.2.w[0]" in text and "model.layers.10.w[0]" not in text and "2 names more: --limit 3" in text


def test_a_folder_means_its_newest_valid_one(job: Job, tmp_path: Path) -> None:
    """A broken newer one is skipped; --shallow compares no checksums, and the read finds what it finds."""
    a = job.save(tmp_path / "a", 41)
    torn = job.later().save(tmp_path / "a", 42)
    (torn / "__0_0_0.distcp").unlink()
    assert diff(tmp_path / "a", a)[0] == 0
    assert diff(tmp_path / "a", a, "--shallow")[2]["a"]["step"] == 41
