"""A run with keys signs what it saves and resumes what is signed; it does not begin anew beside checkpoints that its key refuses."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

import ttp
from tests.unit.adopt.test_protect import BASES, Trainer
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.signing import fix_checksums, make_keys
from tests.unit.checkpoint.test_prune import steps
from tests.unit.session.test_session import do_steps, new_run
from ttp.checkpoint.cli.main import main
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.format.signature import Keys
from ttp.checkpoint.verify import verify
from ttp.config import Settings
from ttp.errors import ConfigError, CorruptCheckpoint
from ttp.proto.messages import Part
from ttp.session import find_session

DIRECTORIES = pytest.mark.parametrize(
    "directories", [{}, {"shared_dirs": False, "host": "node-x"}], ids=["shared", "own"]
)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path)


def settings_of(tmp_path: Path, directories: dict[str, object], *, enable: bool = False) -> Settings:
    paths = {"sign_key": str(tmp_path / "job.pem"), "verify_key": str(tmp_path / "job.pub.pem")}
    return Settings(enable=enable, **{**paths, **directories})  # type: ignore[arg-type]


@DIRECTORIES
def test_a_run_goes_on_from_the_newest_that_it_has_signed(
    tmp_path: Path, keys: Keys, directories: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """A tampered one is said and passed over: its step is trained again, and published in its place. Bits are equal."""
    settings, folder = settings_of(tmp_path, directories), tmp_path / "c"
    whole = do_steps(*new_run(tmp_path / "whole", dataclasses.replace(settings, sign_key="", verify_key="")), 8)
    ttp.current_session().close()
    model, optimizer, session = new_run(folder, settings)
    assert session.resume() is None, "nothing is there: nothing is refused"
    losses = do_steps(model, optimizer, session, 4)
    session.save()
    do_steps(model, optimizer, session, 6)
    newest = Path(session.save())
    session.close()
    assert verify(newest, key=keys.verify).step == 6
    flip_a_bit(newest, next(newest.glob("*.distcp")).name)
    fix_checksums(newest)
    model, optimizer, session = new_run(folder, settings, seed=1)
    point = session.resume()
    assert point is not None and point.step == 4 and "another key has signed it" in caplog.text
    losses += do_steps(model, optimizer, session, 6)
    assert session.save() == str(newest) and verify(newest, key=keys.verify).step == 6
    assert [*losses, *do_steps(model, optimizer, session, 8)] == whole


@DIRECTORIES
def test_a_run_does_not_begin_anew_beside_what_its_key_refuses(
    tmp_path: Path, keys: Keys, directories: dict[str, object]
) -> None:
    """Its progress would be lost for a key that was left out. What was saved without is resumed once it is signed."""
    settings, folder = settings_of(tmp_path, directories), tmp_path / "c"
    model, optimizer, session = new_run(folder, dataclasses.replace(settings, sign_key=""))
    do_steps(model, optimizer, session, 3)
    path = Path(session.save())
    session.close()
    _, _, session = new_run(folder, settings, seed=1)
    with pytest.raises(CorruptCheckpoint) as raised:
        session.resume()
    text = str(raised.value)
    assert text.startswith(
        f"no checkpoint in {folder} is valid and signed for {tmp_path}/job.pub.pem ({path}/manifest.json is not signed"
    )
    assert "Sign one that you trust with `ttp ckpt sign`" in text and "\n" not in text
    session.close()
    if not directories:
        assert main(["sign", "--sign-key", str(tmp_path / "job.pem"), str(path)]) == 0
        point = new_run(folder, settings, seed=1)[2].resume()
        assert point is not None and point.step == 3


def test_a_broken_one_without_a_key_is_passed_over_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, session = new_run(tmp_path / "c", Settings(enable=False))
    do_steps(model, optimizer, session, 3)
    path = Path(session.save())
    session.close()
    flip_a_bit(path, next(path.glob("*.distcp")).name)
    with caplog.at_level(logging.WARNING):
        assert new_run(tmp_path / "c", Settings(enable=False), seed=1)[2].resume() is None
    assert "restarting from step 1" in caplog.text


@pytest.mark.parametrize("name", ["sign_key", "verify_key"])
def test_a_key_that_cannot_be_read_is_refused_at_the_start(name: str, tmp_path: Path, keys: Keys) -> None:
    """Not at the first dump; nothing was made."""
    settings = settings_of(tmp_path, {name: str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=rf"^invalid TTP_{name.upper()}: got {tmp_path}/none \(No such file"):
        new_run(tmp_path / "c", settings)
    assert find_session() is None and not (tmp_path / "c").exists()


def test_a_run_that_keeps_one_keeps_a_signed_one(tmp_path: Path, keys: Keys) -> None:
    """A newer one that no resume takes does not count, and is not removed."""
    settings, folder = settings_of(tmp_path, {}), tmp_path / "c"
    for step, given in ((6, Settings(enable=False)), (1, settings), (2, settings)):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
        session = ttp.start(optimizer, save_dirs=[folder], settings=given, keep_checkpoint_max=1 if step == 2 else None)
        if step == 2:
            assert session.resume() is not None
        do_steps(model, optimizer, session, step)
        session.save()
        session.close()
    assert steps(folder) == [2, 6]


@DIRECTORIES
def test_a_fault_is_saved_signed(tmp_path: Path, keys: Keys, directories: dict[str, object]) -> None:
    """The SHA-256 of the files go through the controller."""
    model, optimizer, session = new_run(tmp_path / "c", settings_of(tmp_path, directories, enable=True))
    with pytest.raises(ZeroDivisionError):
        ttp.ttp_to_persist(do_steps)(model, optimizer, session, 9, dies_after=6)
    session.close()
    (path,) = list_checkpoints([tmp_path / "c"])
    assert verify(path, key=keys.verify).step == 6


def test_a_protected_trainers_fault_is_saved_signed(tmp_path: Path, keys: Keys) -> None:
    """`ttp.protect` begins in the same place."""
    faulted = Trainer(tmp_path / "c", settings_of(tmp_path, {}, enable=True), BASES["AdamW"])
    with pytest.raises(ZeroDivisionError):
        ttp.ttp_to_persist(faulted.train)(dies_at=6)
    faulted.close()
    (path,) = list_checkpoints([tmp_path / "c"])
    assert verify(path, key=keys.verify).step == 5
    again = Trainer(tmp_path / "c", settings_of(tmp_path, {}), BASES["AdamW"])
    assert again.guard.step == 5


def test_shares_of_a_trainers_own_publisher_have_no_sha_256(tmp_path: Path, keys: Keys) -> None:
    """It writes checkpoints in a form of its own, which no manifest describes."""

    class Publisher:
        work_done = 0

        def publish(self, order: object, state: object, advance: object) -> str:
            return ""

    optimizer = ttp.TTPReplicaOptimizer(torch.nn.Linear(8, 4).named_parameters(), replicas=1, lr=0.05)
    settings = settings_of(tmp_path, {})
    session = ttp.start(optimizer, save_dirs=[tmp_path / "c"], settings=settings, publisher=Publisher())
    parts = [Part(group.group_id, 0, 1) for group in optimizer.shard_groups()]
    share = session.holder.write_parts(str(tmp_path / "c"), "iter_0000000_tmp_a", 0, parts)
    assert {file.digest for file in share.files} == {""}
