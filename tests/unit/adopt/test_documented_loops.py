"""The three loops that docs/your_trainer.md begins with, word by word, in one process: cut twice in the middle of a step, they print what the baseline
run prints. With several ranks and real kills: tests/chaos/test_other_trainers.py."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.shown import ROOT

LOOPS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "your_trainer.md").read_text(encoding="utf-8"), re.DOTALL)[
    :3
]


class Cut(Exception):
    """Ends a run in the middle of a step: gradients are there, the optimizer has not begun."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank, without a port; what the loops set for their process is set back."""
    begin, store, threads = dist.init_process_group, dist.HashStore, torch.get_num_threads()  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "init_process_group", lambda backend: begin(backend, store=store(), rank=0, world_size=1))
    monkeypatch.setenv("ENABLE_TTP", "False")
    yield
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, code: str, arguments: list[str], cut: int = 0) -> list[str]:
    """Return the lines that a loop prints. `cut`: in this step it ends, the one before is saved."""
    lines: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__", "print": lambda line, **options: lines.append(line)}

    def before_step(*_: object) -> None:
        if cut and names["guard"].step == cut - 1:
            raise Cut

    monkeypatch.setattr(sys, "argv", ["loop.py", *arguments])
    hook = register_optimizer_step_pre_hook(before_step)
    try:
        with contextlib.suppress(Cut):
            exec(compile(code, "loop.py", "exec"), names)
            assert not cut
        if cut:
            names["guard"].save()
            names["guard"].close()
    finally:
        hook.remove()
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return lines


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("loop", "arguments", "cuts"),
    [(0, ["--steps", "14"], (4, 12)), (1, ["--epochs", "2"], (5, 20)), (2, ["--epochs", "2"], (5, 20))],
    ids=["nanogpt", "accelerate", "sampler"],
)
def test_a_documented_loop_cut_twice_has_the_bits_of_the_baseline_run(
    loop: int, arguments: list[str], cuts: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, learning rates, evaluations and final weights. The second cut is in another epoch, or behind an evaluation."""
    code = LOOPS[loop]
    whole = run(monkeypatch, code, [*arguments, "--save-dir", str(tmp_path / "whole")])
    again = [*arguments, "--save-dir", str(tmp_path / "cut")]
    parts = [run(monkeypatch, code, again, cut) for cut in (*cuts, 0)]
    assert all(parts) and [line for part in parts for line in part] == whole
    assert sum(line.startswith("step ") for line in whole) >= 14 and whole[-1].startswith("final weights: ")
