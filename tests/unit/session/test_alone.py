"""A rank that gets a preemption notice after its controller was killed saves the step by itself: a real session, controller and disk."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from tests.unit.checkpoint.signing import make_keys
from tests.waiting import until
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.format.signature import NO_KEYS, Keys
from ttp.config import Settings
from ttp.controller.agent_link import request_status
from ttp.errors import CheckpointError
from ttp.exchange import saved_alone
from ttp.exchange.saved_alone import SavedAlone
from ttp.proto.messages import EXIT_CODE_PREEMPTED, Cause, CauseKind, Part, PublishOrder, WriteOrder
from ttp.runtime.boundary_save import BoundarySave
from ttp.runtime.standby import TERMS_OF_AN_ATTEMPT, last_term_of, term_of


class Trained:
    """A session of one rank, whose process's end is noted, and lets its training thread go."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        settings: Settings | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = ttp.TTPReplicaOptimizer(self.model.named_parameters(), replicas=1, lr=0.05)
        self.session = ttp.start(
            self.optimizer, save_dirs=[folder], settings=settings or Settings(heartbeat_s=0.05, total_timeout_s=77.0)
        )
        self.session.resume()
        protection = self.session.protection
        assert protection is not None
        self.gate, self.processor = protection.gate, protection.processor
        self.codes: list[int] = []

        def ended(code: int) -> None:
            self.codes.append(code)
            self.gate.step_boundary.release()

        monkeypatch.setattr(self.processor, "_exit_process", ended)

    def step(self) -> None:
        step = self.optimizer.current_step + 1
        self.optimizer.zero_grad()
        self.model(torch.full((2, 8), float(step))).square().mean().backward()
        self.session.set_step_state(step, {"samples": step})
        self.optimizer.step()

    def lose_the_controller(self) -> None:
        os.kill(request_status(self.processor.controller).pid, signal.SIGKILL)
        until(lambda: self.gate.unled, "the loss of the controller")


def test_the_step_in_flight_is_saved_and_the_resumed_rank_has_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Trained(tmp_path, monkeypatch)
    for _ in range(3):
        first.step()
    first.lose_the_controller()
    assert first.processor._settings.alone_s == 77.0, "TTP_OT bounds the save too"
    first.step()
    assert first.codes == [], "training continues without protection"
    first.processor.preempted()
    first.step()
    assert first.codes == [EXIT_CODE_PREEMPTED]
    manifest = read_manifest(tmp_path / "iter_0000005")
    assert (manifest.step, manifest.cause.kind, manifest.cause.ranks) == (5, CauseKind.PREEMPTED, (0,))
    assert "no controller led the ranks" in manifest.cause.text
    account = saved_alone.read(first.session.log_dir, 0, 0.0)
    assert account is not None and (account.step, account.noticed, account.world_size) == (5, (0,), 1)
    assert account.path == str(tmp_path / "iter_0000005") and not account.error
    weights = first.model.weight.detach().clone()
    first.session.raised = True  # its end is none that a trainer sees
    first.session.close()
    again = Trained(tmp_path, monkeypatch)
    assert again.optimizer.current_step == 5 and torch.equal(again.model.weight, weights)
    again.session.raised = True
    again.session.close()


def test_what_a_rank_waits_for_follows_a_long_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is lost without a word is known after a lease: the gradients of the step that it cost are kept for longer (A5)."""
    for lease_s, abandoned_s, lost_s in ((3.0, 5.0, 15.0), (20.0, 22.0, 100.0)):
        trained = Trained(tmp_path, monkeypatch, Settings(lease_s=lease_s))
        assert (trained.gate._abandoned_s, trained.processor._settings.controller_lost_s) == (abandoned_s, lost_s)
        trained.session.raised = True
        trained.session.close()


class OwnForm:
    """A trainer's own publisher."""

    work_done = 0

    def publish(self, order: PublishOrder, state: Mapping[str, Any], advance: Callable[[int], None]) -> str:
        raise AssertionError("nothing is published here")


@pytest.mark.parametrize(
    ("spans_job", "own_form", "together"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_ranks_save_together_only_what_all_enter_and_ttp_publishes(
    tmp_path: Path, spans_job: bool, own_form: bool, together: bool
) -> None:
    """Others wait for a controller as before: what one collective counts is not known of all, or no save is there to be called."""
    optimizer = ttp.TTPReplicaOptimizer(torch.nn.Linear(8, 4).named_parameters(), replicas=1, lr=0.05)
    optimizer.spans_job = spans_job
    publisher = OwnForm() if own_form else None
    session = ttp.start(optimizer, save_dirs=[tmp_path], settings=Settings(), publisher=publisher)
    protection = session.protection
    assert protection is not None
    assert (
        (protection.gate.step_boundary.on_unled is not None) is protection.processor._settings.saves_alone is together
    )
    session.close()


@pytest.mark.parametrize("publisher", [None, OwnForm()])
def test_a_rank_registers_whether_its_trainer_writes_checkpoints_of_its_own(
    tmp_path: Path, publisher: OwnForm | None
) -> None:
    optimizer = ttp.TTPReplicaOptimizer(torch.nn.Linear(8, 4).named_parameters(), replicas=1, lr=0.05)
    session = ttp.start(optimizer, save_dirs=[tmp_path], settings=Settings(), publisher=publisher)
    assert session.holder.registration().own_checkpoints is (publisher is not None)
    session.close()


class NoProcess:
    """Keeps what a processor received."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def saves_alone(self, step: int) -> None:
        self.calls.append(("saves", step))

    def saved_alone(self, step: int, path: str, error: str = "") -> None:
        self.calls.append(("saved", step, path, error))


class Saves:
    """A save that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def save(self, step: int, cause: object) -> str:
        raise self.error


class Holder:
    checkpoint = "/older"

    def __init__(self, keys: Keys = NO_KEYS) -> None:
        self.keys = keys

    class optimizer:
        device = torch.device("cpu")


def fail(folder: Path, saves: Saves, keys: Keys = NO_KEYS) -> tuple[list[tuple[object, ...]], SavedAlone]:
    processor = NoProcess()
    account = saved_alone.path_of(folder, 0)
    save = BoundarySave(saves, Holder(keys), [str(folder)], 0, account)  # type: ignore[arg-type]
    save(7, True, processor)  # type: ignore[arg-type]
    written = saved_alone.read(folder, 0, 0.0)
    assert written is not None
    return processor.calls, written


@pytest.mark.parametrize("error", [CheckpointError("no directory took it"), RuntimeError("closed by peer"), OSError(5)])
def test_a_save_that_fails_is_not_a_save(tmp_path: Path, error: Exception) -> None:
    """Whatever it raises, the process exits: no controller would end it."""
    calls, account = fail(tmp_path, Saves(error))
    text = f"{type(error).__name__}: {error}"
    assert calls == [("saves", 7), ("saved", 7, "", text)]
    assert (account.path, account.error, account.newest) == ("", text, "/older")


class Saved:
    """A session of one rank without a controller, after some steps."""

    def __init__(self, folder: Path, steps: int, *, shared_dirs: bool) -> None:
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = ttp.TTPReplicaOptimizer(self.model.named_parameters(), replicas=1, lr=0.05)
        settings = Settings(enable=False, shared_dirs=shared_dirs)
        self.session = ttp.start(self.optimizer, save_dirs=[folder], settings=settings)
        for step in range(1, steps + 1):
            self.model(torch.full((2, 8), float(step))).square().mean().backward()
            self.session.set_step_state(step, {})
            self.optimizer.step()


def published(folder: Path, *, shared_dirs: bool = True) -> Path:
    """Return a checkpoint of step 7 that is there when the save fails."""
    session = Saved(folder, 7, shared_dirs=shared_dirs).session
    path = Path(session.save())
    session.close()
    return path


@pytest.mark.parametrize("shared_dirs", [True, False])
def test_a_rank_whose_last_collective_failed_believes_the_disk(tmp_path: Path, shared_dirs: bool) -> None:
    """The others had learned of the publish, and had exited."""
    path = published(tmp_path, shared_dirs=shared_dirs)
    calls, account = fail(tmp_path, Saves(RuntimeError("closed by peer")))
    assert calls == [("saves", 7), ("saved", 7, str(path), "")]
    assert (account.path, account.error) == (str(path), "")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", ["a bit", "another node's file", "all but the name", "no signature"])
def test_what_only_has_the_name_of_a_checkpoint_is_none(tmp_path: Path, harm: str) -> None:
    """A broken one of an earlier job, which this one had skipped; this node's piece, whose other nodes have none; or one that no resume would take."""
    path = published(tmp_path, shared_dirs=harm != "another node's file")
    file = next(iter(sorted(path.glob("*.distcp"))))
    if harm == "a bit":
        flip_a_bit(file)
    elif harm == "another node's file":
        file.unlink()
    elif harm == "all but the name":
        shutil.rmtree(path)
        path.mkdir()
    keys = make_keys(tmp_path) if harm == "no signature" else NO_KEYS
    calls, account = fail(tmp_path, Saves(RuntimeError("closed by peer")), keys)
    assert calls == [("saves", 7), ("saved", 7, "", "RuntimeError: closed by peer")] and account.path == ""


def test_pieces_that_ranks_save_alone_take_the_place_of_a_dumps_that_will_never_be_whole(tmp_path: Path) -> None:
    """A controller that was back for a moment had one node publish its piece; no other node follows its orders any more."""
    saved = Saved(tmp_path, 1, shared_dirs=False)
    optimizer, session = saved.optimizer, saved.session
    parts = tuple(Part(group.group_id, 0, 1) for group in optimizer.shard_groups())
    newest = term_of(0, TERMS_OF_AN_ATTEMPT - 2)
    for number, term in enumerate((1, newest)):
        write = WriteOrder(1, 1, str(tmp_path), f"iter_0000001_tmp_{number}", parts)
        cause = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
        order = PublishOrder(1, 1, str(tmp_path), write.tmp_name, (session.holder.write(write),), cause, None, term)
        path = session.holder.publish(order)
    assert read_manifest(Path(path)).term == newest
    account = saved_alone.path_of(tmp_path, 0)
    calls = NoProcess()
    save = BoundarySave(session._saves.together, session.holder, session.save_dirs, 0, account)
    save(1, True, calls)  # type: ignore[arg-type]
    assert calls.calls == [("saves", 1), ("saved", 1, path, "")]
    manifest = read_manifest(Path(path))
    assert (manifest.term, manifest.cause.kind) == (last_term_of(0), CauseKind.PREEMPTED)
    session.close()


def test_until_all_ranks_are_in_the_save_a_failure_is_a_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes out as from any step, and the rank may still be led."""

    def gone(value: object, device: object) -> list[object]:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr("ttp.runtime.boundary_save.exchange_json", gone)
    processor = NoProcess()
    save = BoundarySave(Saves(OSError()), Holder(), [], 0, tmp_path / "account")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed by peer"):
        save(7, True, processor)  # type: ignore[arg-type]
    assert processor.calls == [] and not (tmp_path / "account").exists()


ACCOUNT = SavedAlone(10.0, 11.0, 7, "/a/iter_0000007", "", (1,), 3, "")
WRITTEN = dataclasses.asdict(ACCOUNT)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"step": 7}', "\x00", '{"unix_s": "x"}', "null", '{"noticed": ["x"]}', "[" * 100_000),
        *(
            json.dumps({**WRITTEN, name: value})
            for name, value in [
                ("step", 10**30),
                ("world_size", 10**12),
                ("world_size", 0),
                ("unix_s", math.inf),
                ("began_unix_s", math.nan),
                ("noticed", [3]),
                ("noticed", [-1]),
                ("path", None),
                ("step", True),
                ("error", 5),
            ]
        ),
    ],
)
def test_an_account_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    saved_alone.write(saved_alone.path_of(tmp_path, 2), ACCOUNT)
    assert saved_alone.read(tmp_path, 2, 9.0) == ACCOUNT
    assert saved_alone.read(tmp_path, 2, 12.0) is None, "an earlier job's"
    assert saved_alone.read(tmp_path, 3, 9.0) is None
    saved_alone.path_of(tmp_path, 2).write_text(content)
    assert saved_alone.read(tmp_path, 2, 9.0) is None


def test_a_path_that_is_not_utf8_is_read_as_it_was_written(tmp_path: Path) -> None:
    account = dataclasses.replace(ACCOUNT, path="/a\udcff/iter_0000007")
    saved_alone.write(saved_alone.path_of(tmp_path, 2), account)
    assert saved_alone.read(tmp_path, 2, 9.0) == account


def test_a_pipe_in_place_of_the_account_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(saved_alone.path_of(tmp_path, 2))
    assert saved_alone.read(tmp_path, 2, 9.0) is None


def test_an_account_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_alone.write(tmp_path / "no_such" / "account.json", ACCOUNT)
    assert "that step 7 was saved without a controller cannot be written" in caplog.text
