"""A checkpoint that the running job removes while it is looked at: it is not broken, and newer ones are there."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

import ttp
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.signing import make_keys
from ttp.checkpoint import verify
from ttp.checkpoint.cli import main
from ttp.checkpoint.find import open_at
from ttp.checkpoint.format.manifest import Manifest, sign_manifest
from ttp.checkpoint.prune import take_away
from ttp.errors import CheckpointError
from ttp.proto.messages import FileEntry

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


def run(*words: object) -> tuple[int, str]:
    out = io.StringIO()
    status = main.main([str(word) for word in words], Console(file=out, width=300, no_color=True, highlight=False))
    return status, out.getvalue()


At = Callable[[int, Callable[[], object]], None]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> At:
    """Return a function that has something happen when the files of a step are about to be read, once."""

    def plan(step: int, happen: Callable[[], object]) -> None:
        pending = [happen]
        real = verify.files_here

        def watched(root: Path, manifest: Manifest) -> tuple[FileEntry, ...]:
            if pending and root.name == f"iter_{step:07d}":
                pending.pop()()
            return real(root, manifest)

        monkeypatch.setattr(verify, "files_here", watched)

    return plan


def removed(folder: Path, *steps: int) -> Callable[[], None]:
    """Return what removes these, oldest first, as a job does."""

    def remove() -> None:
        for step in sorted(steps):
            take_away(folder / f"iter_{step:07d}", step)

    return remove


def test_the_others_of_a_folder_are_the_answer(job: Job, tmp_path: Path, at_step: At) -> None:
    make_keys(tmp_path)
    folder = tmp_path / "c"
    for step in (10, 20, 30):
        job.save(folder, step)
    at_step(20, removed(folder, 20))
    status, text = run("verify", folder)
    assert (
        status == 0 and "2 checkpoints checked: none is broken; 1 removed meanwhile" in text and "INVALID" not in text
    )
    for step, words in ((20, ["list"]), (30, ["sign", "--sign-key", tmp_path / "job.pem"])):
        if step == 20:
            job.save(folder, step)
        at_step(step, removed(folder, step))
        status, text = run(words[0], folder, *words[1:], "--json")
        found = json.loads(text)["checkpoints"]
        assert status == 0 and f"iter_{step:07d}" not in text and found, words
    at_step(10, removed(folder, 10))
    status, text = run("verify", folder)
    assert status == 3 and "iter_0000010 was removed while it was checked. Start the command again" in text


def test_a_checkpoint_that_goes_before_it_is_signed_is_not_called_broken(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path)
    folder = tmp_path / "c"
    for step in (10, 20):
        job.save(folder, step)
    real = sign_manifest

    def late(directory: Path, *given: Any) -> None:
        if directory.name == "iter_0000020":
            take_away(directory, 20)
        real(directory, *given)

    monkeypatch.setattr("ttp.checkpoint.sign.sign_manifest", late)
    status, text = run("sign", folder, "--sign-key", tmp_path / "job.pem")
    assert status == 0 and "iter_0000010: step 10" in text and "iter_0000020" not in text


def test_what_is_published_meanwhile_is_opened(job: Job, tmp_path: Path, at_step: At) -> None:
    """The folder is listed again; what was found broken before is not read again, and is reported once."""
    for step in (10, 20, 30):
        job.save(tmp_path, step)
    flip_a_bit(tmp_path / "iter_0000030")

    def save() -> None:
        job.save(tmp_path, 25)
        take_away(tmp_path / "iter_0000020", 20)

    at_step(20, save)
    found = ttp.open_checkpoint(tmp_path)
    assert found.step == 25 and len(found.skipped) == 1 and "iter_0000030" in found.skipped[0]
    at_step(25, removed(tmp_path, 10, 25))
    reasons: list[str] = []
    with pytest.raises(CheckpointError, match=r"holds no valid checkpoint: .*iter_0000030"):
        open_at(tmp_path, verify.verify, lambda path, reason: reasons.append(reason))
    assert len(reasons) == 1
