"""TensorBoard's files of a run: each step once, over restarts too, and a missing package is one line."""

from __future__ import annotations

import errno
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lone_process import lone_process
from tests.tensorboard_files import points, single
from tests.waiting import LONG_S, until
from ttp.curves.board import MOST_WAITING, Board, StepPoints
from ttp.trainer.__main__ import main
from ttp.trainer.metrics import account, read_lines

NAMES = {
    "train/loss", "train/grad_norm", "train/learning_rate", "train/loss_scale", "speed/tokens_per_second", "speed/step_seconds",
}  # fmt: skip
Run = Callable[[dict[str, Any]], int]


@pytest.fixture
def run(tmp_path: Path, small_keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    def train(changes: dict[str, Any]) -> int:
        keys = {**small_keys, "training_config.output_dir": tmp_path / "output", **changes}
        return main(["--config", "gpt_tiny", *(f"--{key}={value}" for key, value in keys.items())])

    with lone_process(monkeypatch):
        yield train


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_step_is_there_once_over_a_restart(run: Run, tmp_path: Path) -> None:
    """The second run begins again after step 2, though the first one had come to step 5: what it does not do again is gone."""
    board = tmp_path / "board"
    given = {"training_config.tensorboard": board, "training_config.save_interval": 2}
    assert run({**given, "training_config.training_iters": 5}) == 0
    (tmp_path / "output/checkpoints/latest_checkpointed_iteration.txt").unlink()
    for step in (4, 5):
        (tmp_path / f"output/checkpoints/iter_{step:07}").rename(tmp_path / f"gone_{step}")
    assert run({**given, "training_config.training_iters": 4}) == 0
    lines = account(read_lines(tmp_path / "output/metrics.jsonl"))
    found = points(board)
    assert found.keys() == NAMES and len(list(board.iterdir())) == 2
    for steps in found.values():
        assert list(steps) == [1, 2, 3, 4]
    assert found["train/loss"] == {step: single(float.fromhex(line["loss"])) for step, line in lines.items()}


def test_without_the_key_nothing_is_loaded_or_written(run: Run, tmp_path: Path) -> None:
    assert run({"training_config.training_iters": 1}) == 0
    assert not list((tmp_path / "output").rglob("events.out*"))


def test_a_missing_package_is_one_line_before_anything_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name))
    assert run({"training_config.tensorboard": tmp_path / "board"}) == 2
    printed = capsys.readouterr().err
    assert "the package tensorboard is not installed; run pip install" in printed and "Traceback" not in printed
    assert not (tmp_path / "output").exists() and not (tmp_path / "board").exists()


@pytest.mark.parametrize("folder", ["file", "/proc/self"])
def test_a_folder_that_cannot_be_written_is_one_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """One that cannot be made, and one that is there and takes no file."""
    (tmp_path / "file").touch()
    assert run({"training_config.tensorboard": tmp_path / folder}) == 2
    assert "name a folder that this user can write" in capsys.readouterr().err


def step(number: int) -> StepPoints:
    return StepPoints(step=number, loss=1.0)


class Writer:
    """One whose disk hangs until it is let go, and then refuses where there is an `error`."""

    def __init__(self, error: OSError | None = None) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._error = error

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.reached.set()
        assert self.go_on.wait(LONG_S)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        pass


def test_no_step_waits_for_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer()
    with caplog.at_level(logging.WARNING, "ttp"):
        board = Board(lambda: writer)  # type: ignore[arg-type,return-value]
        board.step(step(1))
        assert writer.reached.wait(LONG_S)
        for number in range(MOST_WAITING + 10):
            board.step(step(number))
        board.close(0.1)
    writer.go_on.set()
    assert caplog.text.count("others are left out") == caplog.text.count("within 0.1 s") == 1
    assert "the points of 10 steps were left out" in caplog.text


@pytest.mark.parametrize("opens", [True, False])
def test_a_disk_that_refuses_is_one_line_and_the_training_continues(
    caplog: pytest.LogCaptureFixture, opens: bool
) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")

    def open_writer() -> Any:
        if not opens:
            raise error
        writer = Writer(error)
        writer.go_on.set()
        return writer

    with caplog.at_level(logging.WARNING, "ttp"):
        board = Board(open_writer)
        for number in range(3 * MOST_WAITING):
            board.step(step(number))
        until(lambda: "No space left on device" in caplog.text, "its line")
        board.close()
    assert caplog.text.count("no points are written from here on") == 1


def test_a_disk_that_refuses_as_the_run_ends_keeps_no_one_waiting() -> None:
    """The end waits for room among the points, and then no more are written."""
    writer = Writer(OSError(errno.EIO, "Input/output error"))
    board = Board(lambda: writer)  # type: ignore[arg-type,return-value]
    board.step(step(1))
    assert writer.reached.wait(LONG_S)
    for number in range(MOST_WAITING):
        board.step(step(number))
    closing = threading.Thread(target=board.close, args=(10 * LONG_S,), daemon=True)
    closing.start()
    writer.go_on.set()
    closing.join(LONG_S)
    assert not closing.is_alive()


def test_a_disk_that_refuses_the_last_points_keeps_no_one_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Closing(Writer):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = Closing()
    writer.go_on.set()
    with caplog.at_level(logging.WARNING, "ttp"):
        board = Board(lambda: writer)  # type: ignore[arg-type,return-value]
        board.step(step(1))
        closing = threading.Thread(target=board.close, args=(10 * LONG_S,), daemon=True)
        closing.start()
        closing.join(LONG_S)
    assert not closing.is_alive()
    assert caplog.text.count("no points are written from here on") == 1
