"""A launch of ttprun on nodes with directories of their own: its restarts go on from what it has written itself, or has begun from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.session.test_session import do_steps, new_run
from ttp.checkpoint.format.manifest import read_manifest
from ttp.config import Settings
from ttp.errors import CorruptCheckpoint
from ttp.exchange import launch_file
from ttp.exchange.launch_file import Launch


def test_a_restart_of_a_launch_goes_on_from_its_own_steps(tmp_path: Path) -> None:
    """Step 9 of another launch is in the directory, and was not whole as this launch began, after step 4."""
    attempts = [tmp_path / name for name in "abcd"]
    for attempt in attempts:
        attempt.mkdir()
    own = Settings(enable=False, shared_dirs=False, host="node-x")
    others, saved = tmp_path / "others", tmp_path / "saved"
    model, optimizer, session = new_run(others, own)
    for step in (4, 9):
        do_steps(model, optimizer, session, step)
        session.save()
    session.close()
    saved.mkdir()
    shutil.copytree(others / "iter_0000004", saved / "iter_0000004")

    def begin(attempt: Path) -> tuple[int, Launch | None]:
        """Resume, train a step, and save."""
        model, optimizer, session = new_run(saved, replace(own, round_number=1, attempt_dir=str(attempt)), seed=1)
        point = session.resume()
        assert point is not None
        do_steps(model, optimizer, session, point.step + 1)
        session.save()
        session.close()
        return point.step, launch_file.read(attempt)

    step, launch = begin(attempts[0])
    assert step == 4 and launch is not None and launch.began_after == 4
    shutil.copytree(others / "iter_0000009", saved / "iter_0000009")
    launch_file.write(attempts[1], launch)
    assert begin(attempts[1]) == (5, launch)
    assert {read_manifest(saved / f"iter_000000{step}").launch for step in (5, 6)} == {launch.name}
    step, another = begin(attempts[2])
    assert step == 9 and another is not None and another.name != launch.name, "a launch may begin from any"
    model, optimizer, session = new_run(tmp_path / "empty", replace(own, attempt_dir=str(attempts[3])))
    with pytest.raises(CorruptCheckpoint, match="is not a valid checkpoint"):
        session.resume(str(tmp_path / "empty" / "iter_0000007"))
    assert launch_file.read(attempts[3]) is None, "it has begun from nothing yet"
    assert session.resume() is None
    session.close()
    fresh = launch_file.read(attempts[3])
    assert fresh is not None and fresh.began_after == 0
