"""A Megatron-style trainer whose model is split (tensor x pipeline x data parallel), patched for MindIO TTP, loses ranks and goes on
bit for bit from the files that its own handlers wrote, one for each model part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.chaos.megatron import STEPS, TRAINER, Run, odd_trainer

SPLIT = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
PARTS = {"mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"}

pytestmark = pytest.mark.long


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "killed"


def assert_same_lines_and_weights(killed: Run, whole: Run, parts: set[str] = PARTS) -> None:
    assert sorted(whole.lines) == list(range(1, STEPS + 1)), whole.text
    for step, line in killed.lines.items():
        assert line == whole.lines[step], f"step {step}\n{killed.text}"
    expected, got = whole.final_weights(), killed.final_weights()
    assert {name.split()[0] for name in expected} == parts and set(got) == set(expected)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def assert_saved_by_every_rank_but(killed: Run, step: int, dead: int) -> None:
    """The save handler ran on every rank that wrote a share: all that were left."""
    found = re.findall(rf"rank (\d+) successfully saved checkpoint at iteration +{step} to", killed.text)
    assert sorted(map(int, found)) == [rank for rank in range(8) if rank != dead], killed.text
    assert {path.name for path in (killed.save / f"iter_{step:07d}").iterdir()} == PARTS


def test_a_split_model_goes_on_bit_for_bit_after_kills_at_every_phase(folders: tuple[Path, Path]) -> None:
    """TP 2 x PP 2 x DP 2: ranks of all model parts die, rank 0 among them, in the backward pass, READY, with the record, in the update, DONE
    and in the gather; each fault is saved by every rank that remains, one file for each model part."""
    whole = Run(folders[0], 8, *SPLIT)
    deaths = [(3, 3, "backward"), (0, 5, "updating"), (6, 8, "ready")]
    faults = [f"kill:rank={rank},step={step},point={point},round={n}" for n, (rank, step, point) in enumerate(deaths)]
    killed = Run(folders[1], 8, *SPLIT, faults=";".join(faults))
    for start, (rank, step, _) in enumerate(deaths):
        saved = killed.published(start)
        assert saved in (step - 1, step)
        assert_saved_by_every_rank_but(killed, saved, rank)
    assert_same_lines_and_weights(killed, whole)
    assert "its training thread did not" not in killed.text


def test_a_split_model_in_bf16_with_local_copies_and_periodic_checkpoints(folders: tuple[Path, Path]) -> None:
    """The other phases: with the record, DONE, in the gather; a periodic checkpoint has one file a model part as well."""
    arguments = (*SPLIT, "--bf16", "--local-copy-os", "--save-interval", "7")
    whole = Run(folders[0], 8, *arguments)
    deaths = [(5, 4, "record"), (0, 9, "done"), (2, 12, "gathering")]
    faults = [f"kill:rank={rank},step={step},point={point},round={n}" for n, (rank, step, point) in enumerate(deaths)]
    killed = Run(folders[1], 8, *arguments, faults=";".join(faults))
    for start, (_, step, _) in enumerate(deaths):
        assert killed.published(start) in (step - 1, step)
    assert {path.name for path in (whole.save / "iter_0000007").iterdir()} == PARTS
    assert_same_lines_and_weights(killed, whole)


VIRTUAL = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
EXPERTS = ("--expert-model-parallel-size", "2", "--num-experts", "4")


@pytest.mark.parametrize(
    ("ranks", "arguments", "parts"),
    [
        (4, VIRTUAL, {"mp_rank_00_000", "mp_rank_00_001"}),
        (4, EXPERTS, {"mp_rank_00_000", "mp_rank_00_001"}),
        (8, (*VIRTUAL, *EXPERTS), {f"mp_rank_00_00{stage}_00{expert}" for stage in (0, 1) for expert in (0, 1)}),
    ],
    ids=["virtual stages", "experts", "both"],
)
def test_virtual_stages_and_experts_go_on_bit_for_bit(
    folders: tuple[Path, Path], ranks: int, arguments: tuple[str, ...], parts: set[str]
) -> None:
    """PP 2 with two chunks a stage, EP 2 with four experts, and both: a rank dies with the update done, and rank 0 while it updates."""
    whole = Run(folders[0], ranks, *arguments)
    deaths = [(1, 6, "done"), (0, 13, "updating")]
    faults = [f"kill:rank={rank},step={step},point={point},round={n}" for n, (rank, step, point) in enumerate(deaths)]
    killed = Run(folders[1], ranks, *arguments, faults=";".join(faults))
    for start, (_, step, _) in enumerate(deaths):
        saved = killed.published(start)
        assert saved in (step - 1, step)
        assert {path.name for path in (killed.save / f"iter_{saved:07d}").iterdir()} == parts
    assert_same_lines_and_weights(killed, whole, parts)
    axis = "ep 1 shard" if "--num-experts" in arguments else "pp 1 shard"
    assert axis in killed.text, "the table of holders names the model part"


@pytest.mark.parametrize(
    ("arguments", "unsplit"),
    [(VIRTUAL, VIRTUAL[:4]), (EXPERTS, EXPERTS[2:])],
    ids=["virtual stages", "experts"],
)
def test_the_examples_chunks_and_experts_are_the_models(
    folders: tuple[Path, Path], arguments: tuple[str, ...], unsplit: tuple[str, ...]
) -> None:
    """Without dropout a model that is not split so has the same losses and norms."""
    reported = [
        Run(folder, 4, *given, "--hidden-dropout", "0", "--train-iters", "5").lines
        for folder, given in zip(folders, (arguments, unsplit), strict=True)
    ]
    assert sorted(reported[0]) == list(range(1, 6))
    for step, line in reported[0].items():
        for one, other in zip(line[2:], reported[1][step][2:], strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-5)


def _dying_in_handler(folder: Path, rank: int) -> str:
    """Return the trainer, in which this rank is killed once, in the middle of its save handler."""
    path = folder / "dying.py"
    path.write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(Path(TRAINER).parent)!r})
from minilink import checkpointing
usual = checkpointing.ensure_directory_exists

def dies_once(filename):
    usual(filename)
    if os.environ["RANK"] == "{rank}" and "_tmp" in filename and not os.path.exists({str(folder / "died")!r}):
        open({str(folder / "died")!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

checkpointing.ensure_directory_exists = dies_once
from minilink.arguments import parse_args
from minilink.training import pretrain
parse_args()
pretrain()
"""
    )
    return str(path)


def test_a_save_rank_that_dies_in_its_handler_is_followed_by_another_of_its_part(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Rank 3 dies at step 7, and rank 5, the save rank of another model part, is killed in its save handler: rank 7 saves that part."""
    whole = Run(folders[0], 8, *SPLIT)
    killed = Run(folders[1], 8, *SPLIT, faults="kill:rank=3,step=7,point=done", trainer=_dying_in_handler(tmp_path, 5))
    step = killed.published()
    assert (
        tmp_path / "died"
    ).exists() and f"rank 5 successfully saved checkpoint at iteration {step:7d}" not in killed.text
    assert f"rank 7 successfully saved checkpoint at iteration {step:7d}" in killed.text
    assert_same_lines_and_weights(killed, whole)


def test_an_odd_number_of_data_parallel_ranks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """TP 2 x DP 3 by the patch for odd sizes, in FP16 with a loss scale that grows, without FP32 gradients, zeros counted."""
    fp16 = ("--fp16", "--loss-scale-window", "4", "--release-fp32-grad", "--log-num-zeros-in-grad")
    odd = ("--tensor-model-parallel-size", "2", *fp16)
    trainer = odd_trainer(tmp_path)
    whole = Run(folders[0], 6, *odd, trainer=trainer)
    killed = Run(folders[1], 6, *odd, faults="kill:rank=0,step=9,point=done", trainer=trainer)
    assert killed.published() in (8, 9)
    expected, got = whole.final_weights(), killed.final_weights()
    assert {name.split()[0] for name in expected} == {"mp_rank_00", "mp_rank_01"}
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert all(whole.lines[step] == line for step, line in killed.lines.items()), killed.text
    assert set(re.findall(r"num zeros: \d+", killed.text)) <= set(re.findall(r"num zeros: \d+", whole.text)) != set()
