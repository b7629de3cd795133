"""What a job with a fault leaves behind, and what it has while it runs: its own files for this user alone, checkpoints by the umask."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.conftest import run_to_end
from tests.chaos.launching import WARM
from tests.umasks import modes, umask
from ttp.chaos.observed.training_job import TrainingJob

KILL = "kill:rank=1,step=5,point=updating,round=0;hang:rank=0,step=9,point=backward,round=1"
RESULTS = re.compile(r"(checkpoints|text_cache)(/.*)?|metrics\.jsonl|final\.json")
"""Of the bundled trainer: they follow the umask, but for what is OWN."""
OWN = re.compile(r"checkpoints/\.ttp_.*")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a folder for temporary files with a short path: that of a socket has 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("mask", "given", "private"),
    [(0, "", (0o600, 0o700)), (0o077, "0640", (0o640, 0o750))],
    ids=["umask 0", "umask 077"],
)
@pytest.mark.long
def test_a_job_leaves_private_files_and_checkpoints_by_the_umask(
    mask: int, given: str, private: tuple[int, int], tmp_path: Path, temporary: Path
) -> None:
    """A kill and a hang: journals, their logs, stacks, reports. While it runs: sockets and directories for temporary files."""
    output = tmp_path / "output"
    live: dict[str, int] = {}

    def look(job: TrainingJob) -> None:
        job.wait_for_step(2)
        for path in temporary.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                live[str(path.relative_to(temporary))] = path.lstat().st_mode

    environ = {
        **WARM,
        "TTP_FILE_MODE": given,
        "TMPDIR": str(temporary),
        "TTP_HANG_FLOOR_S": "3",
        "TTP_HANG_START_S": "3",
    }
    with umask(mask), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TTP_FILE_MODE", given)  # the harness makes the output folder and the console's file
        run_to_end(output, 2, faults=KILL, environ=environ, meanwhile=look)
    sockets = [name for name, mode in live.items() if stat.S_ISSOCK(mode)]
    assert sockets and {stat.S_IMODE(live[name]) for name in sockets} == {0o600}
    made = ("ttp_attempt_", "ttp_fork_server_", "torchelastic_")
    folders = [name for name in live if name.startswith(made) and "/" not in name]
    assert {next((each for each in made if name.startswith(each)), name) for name in folders} == set(made), folders
    assert {stat.S_IMODE(live[name]) for name in folders} == {0o700}
    found = {name: mode for name, mode in modes(output).items() if OWN.fullmatch(name) or not RESULTS.fullmatch(name)}
    names = {Path(name).name for name in found}
    assert {
        "journal_0.jsonl",
        "journal_0.log",
        "story.jsonl",
        "stacks_1.txt",
        "stacks.log",
        "stacks_asked.log",
        ".ttp_lock",
    } <= names
    wrong = {name: oct(mode) for name, mode in found.items() if mode != private[(output / name).is_dir()]}
    assert not wrong
    results = {name: mode for name, mode in modes(output).items() if name not in found and name != "metrics.jsonl"}
    assert any(name.endswith("/manifest.json") for name in results) and any(
        name.endswith(".distcp") for name in results
    )
    expected = (0o666 & ~mask, 0o777 & ~mask)
    wrong = {name: oct(mode) for name, mode in results.items() if mode != expected[(output / name).is_dir()]}
    assert not wrong
    assert not [name for name in os.listdir(temporary) if name.startswith("ttp_")]
