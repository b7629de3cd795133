"""A session of one rank, with a real controller: what `ttp.start`, `ttp_to_persist`, `resume` and `save` promise."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import ttp
from ttp.checkpoint import find
from ttp.checkpoint.format.manifest import read_manifest
from ttp.config import Settings
from ttp.errors import CheckpointError, ConfigError, NotWritable
from ttp.exchange.launch_file import is_name
from ttp.processor.driver import Processor
from ttp.proto.messages import Cause, CauseKind, Part, PublishOrder, Welcome, WriteOrder
from ttp.runtime import rank_runtime
from ttp.runtime.job_controller import JobController
from ttp.runtime.preemption import Notice
from ttp.runtime.standby import Standbys
from ttp.session import current_session

ON = Settings(enable=True)
OFF = Settings(enable=False)


def new_run(
    folder: Path, settings: Settings, seed: int = 0
) -> tuple[torch.nn.Module, ttp.TTPReplicaOptimizer, ttp.Session]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    return model, optimizer, ttp.start(optimizer, save_dirs=[folder], settings=settings)


def do_steps(
    model: torch.nn.Module, optimizer: ttp.TTPReplicaOptimizer, session: ttp.Session, last: int, dies_after: int = -1
) -> list[float]:
    """Train to step `last`; raise in the middle of the step after `dies_after`."""
    losses = []
    for step in range(optimizer.current_step + 1, last + 1):
        optimizer.zero_grad()
        loss = model(torch.full((2, 8), float(step))).square().mean()
        loss.backward()
        if step == dies_after + 1:
            raise ZeroDivisionError("the trainer's own mistake")
        session.set_step_state(step, {"position": 2 * step})
        losses.append(optimizer.step(sums=[loss.item()]).sums[0])
    return losses


def test_a_node_with_directories_of_its_own_saves_persists_and_resumes(tmp_path: Path) -> None:
    """Periodic checkpoint and dying gasp are pieces; the newest is loaded with the same bits."""
    own = Settings(enable=True, shared_dirs=False, host="node-x")
    whole = do_steps(*new_run(tmp_path / "whole", OFF), 9)
    current_session().close()
    model, optimizer, session = new_run(tmp_path / "faulted", own)
    losses = do_steps(model, optimizer, session, 4)
    session.save()
    with pytest.raises(ZeroDivisionError):
        ttp.ttp_to_persist(do_steps)(model, optimizer, session, 9, dies_after=6)
    session.close()
    published = [read_manifest(Path(path)) for path in find.list_checkpoints([tmp_path / "faulted"])]
    assert [(manifest.step, manifest.hosts) for manifest in published] == [(6, ("node-x",)), (4, ("node-x",))]
    assert len({manifest.launch for manifest in published}) == 1 and is_name(published[0].launch)
    model, optimizer, session = new_run(tmp_path / "faulted", dataclasses.replace(own, enable=False), seed=1)
    point = session.resume()
    assert point is not None and (point.step, point.state) == (6, {"position": 12})
    losses = [*losses, *whole[4:6], *do_steps(model, optimizer, session, 9)]
    assert losses == whole


@pytest.mark.parametrize("every", [1, 3])
def test_a_loop_that_takes_its_place_from_the_step_state_can_be_entered_again(tmp_path: Path, every: int) -> None:
    """The place in the data is what was given for the newest step, in the first step too, and after a resume."""
    whole = do_steps(*new_run(tmp_path / "whole", ON), 9)
    current_session().save()
    current_session().close()
    model, optimizer, session = new_run(tmp_path / "rehearsed", dataclasses.replace(ON, rehearse_every=every))
    losses: dict[int, float] = {}

    def train(last: int) -> None:
        position = session.step_state().get("position", 0)
        for step in range(optimizer.current_step + 1, last + 1):
            assert position == 2 * (step - 1)
            losses[step] = do_steps(model, optimizer, session, step)[0]
            position += 2

    ttp.ttp_to_persist(train)(9)
    session.save()
    session.close()
    assert list(losses.values()) == whole
    model, optimizer, session = new_run(tmp_path / "rehearsed", OFF, seed=1)
    assert session.resume() is not None and session.step_state() == {"position": 18}
    session.close()


def test_a_piece_carries_the_term_of_the_controller_that_ordered_it(tmp_path: Path) -> None:
    """A standby took over within the attempt: an order of the first controller comes late, and changes nothing."""
    own = Settings(enable=False, shared_dirs=False, host="node-x")
    model, optimizer, session = new_run(tmp_path, own)
    do_steps(model, optimizer, session, 3)
    parts = tuple(Part(group.group_id, 0, 1) for group in optimizer.shard_groups())

    def order(term: int) -> PublishOrder:
        write = WriteOrder(1, 3, str(tmp_path), f"iter_0000003_tmp_{term}_1_1", parts)
        result = session.holder.write(write)
        cause = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
        return PublishOrder(1, 3, str(tmp_path), write.tmp_name, (result,), cause, None, term)

    late = order(1)
    path = session.holder.publish(order(2))
    assert read_manifest(Path(path)).term == 2
    with pytest.raises(CheckpointError, match=r"published by a controller of term 2 .* is of term 1"):
        session.holder.publish(late)
    assert read_manifest(Path(path)).term == 2


def test_a_publisher_puts_its_own_record_of_the_step_into_the_manifest(tmp_path: Path) -> None:
    """An order with another record, or with none, changes nothing of what the rank knows by itself."""
    model, optimizer, session = new_run(tmp_path, Settings(enable=False))
    do_steps(model, optimizer, session, 3)
    own = optimizer.last_record
    assert own is not None and own.step == 3
    parts = tuple(Part(group.group_id, 0, 1) for group in optimizer.shard_groups())
    cause = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
    write = WriteOrder(1, 3, str(tmp_path), "iter_0000003_tmp_1_1_1", parts)
    foreign = dataclasses.replace(own, learning_rates=(7.0,), clip_factor=0.25)
    order = PublishOrder(1, 3, str(tmp_path), write.tmp_name, (session.holder.write(write),), cause, foreign, 1)
    assert read_manifest(Path(session.holder.publish(order))).record == own


def test_an_exception_is_persisted_and_goes_on(tmp_path: Path) -> None:
    """Even a lone rank is a whole holder when its own code raises: the next attempt loses nothing."""
    model, optimizer, session = new_run(tmp_path / "faulted", ON)
    with pytest.raises(ZeroDivisionError, match="own mistake"):
        ttp.ttp_to_persist(do_steps)(model, optimizer, session, 9, dies_after=5)
    session.close()
    model, optimizer, session = new_run(tmp_path / "faulted", ON, seed=1)
    point = session.resume()
    assert point is not None and point.step == 5 and point.state == {"position": 10}
    assert point.record is not None and point.record.step == 5
    rest = ttp.ttp_to_persist(do_steps)(model, optimizer, session, 9)
    session.close()

    other, optimizer, session = new_run(tmp_path / "whole", OFF)
    assert do_steps(other, optimizer, session, 9)[5:] == rest
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_start_shows_what_lies_where_and_what_is_survived_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ttp"):
        model, optimizer, session = new_run(tmp_path, ON)
        ttp.ttp_to_persist(do_steps)(model, optimizer, session, 1)
        session.close()
    lines = caplog.messages
    for expected in ("on no other rank", "the job survives: 0 of 1 ranks", "replicas need more ranks"):
        assert sum(expected in line for line in lines) == 1, lines
    assert not any("controller of term" in line for line in lines), "it was introduced already"


def test_a_program_without_logging_sees_what_its_job_survives(capsys: pytest.CaptureFixture[str]) -> None:
    quiet, rank_runtime.log = rank_runtime.log, logging.Logger("no handler, no parent")
    try:
        rank_runtime.introduce(
            Welcome(0, 1, 1.0, 3.0, "any 1 of 2 ranks", ("b:1",), 1, ("rank 0 on node a",), ("beware",))
        )
    finally:
        rank_runtime.log = quiet
    output = capsys.readouterr().err.splitlines()
    assert output == [
        "ttp: rank 0 on node a",
        "ttp: protected by a controller with 1 standby; the job survives: any 1 of 2 ranks",
        "ttp: warning: beware",
    ]


def test_a_session_that_is_closed_in_the_middle_of_training_takes_its_controller_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank alone: no other rank needs it. It would leave after a while by itself, with a warning at each close before."""
    model, optimizer, session = new_run(tmp_path, ON)
    do_steps(model, optimizer, session, 2)
    assert session._protection is not None
    controller = session._protection._controller._process
    assert controller is not None and controller.wait(0.0) is None
    caplog.clear()
    session.close()
    assert controller.wait(0.0) == 0
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("TTP has no checkpoint of step 2, the last one")


def test_a_session_closed_on_the_way_of_an_exception_saves_first(tmp_path: Path) -> None:
    """No decorator: `finally` is where the trainer says that it ends."""
    model, optimizer, session = new_run(tmp_path, ON)
    with pytest.raises(ZeroDivisionError, match="own mistake"):
        try:
            do_steps(model, optimizer, session, 9, dies_after=5)
        finally:
            session.close()
    newest = find.find_newest_valid([tmp_path])
    assert newest is not None and newest.path == tmp_path / "iter_0000005"


@pytest.mark.parametrize("decorated", [True, False])
def test_training_that_has_ended_is_not_entered_again(decorated: bool, tmp_path: Path) -> None:
    """Also where something outside of `train` raised: an order to regroup is refused at once."""
    model, optimizer, session = new_run(tmp_path, ON)
    reentry = MagicMock(closed=False, ordered=True)
    reentry.come_back.side_effect = ZeroDivisionError("TTP's own mistake")
    assert session._protection is not None
    session.reentry = session._protection._reentry = reentry
    train = ttp.ttp_to_persist(do_steps) if decorated else do_steps
    with pytest.raises(ZeroDivisionError, match="mistake"):
        try:
            train(model, optimizer, session, 9, dies_after=5)
        finally:
            session.close()
    reentry.close.assert_called_once_with("training has ended with ZeroDivisionError")
    assert reentry.come_back.called is decorated


def test_a_session_within_an_exceptions_handler_ends_normally(tmp_path: Path) -> None:
    """`except ImportError: main()` has that exception all the time: it is not on its way."""
    try:
        raise ImportError("no such library")
    except ImportError:
        model, optimizer, session = new_run(tmp_path, ON)
        do_steps(model, optimizer, session, 2)
        session.close()
    assert '"fault_reported"' not in (tmp_path / "ttp_log" / "journal_0.jsonl").read_text()
    assert '"finished"' in (tmp_path / "ttp_log" / "journal_0.jsonl").read_text()


def test_the_controller_knows_the_rank_that_started_it(tmp_path: Path) -> None:
    """With it ends a controller that no rank has come to."""
    _, _, session = new_run(tmp_path, ON)
    assert session._protection is not None and session._protection._controller._process is not None
    controller = session._protection._controller._process
    words = Path(f"/proc/{controller.pid}/cmdline").read_text().split("\0")
    assert words[words.index("--guardian") + 1] == str(os.getpid())
    session.close()


class AskedController:
    """A controller's process that never ends."""

    pid = 71

    def __init__(self) -> None:
        self.asked: list[str] = []

    def wait(self, timeout_s: float) -> None:
        self.asked.append(f"{timeout_s:.0f} s")

    def terminate(self) -> None:
        self.asked.append("terminate")

    def dismiss(self) -> None:
        self.asked.append("dismiss")


def no_standbys() -> Standbys:
    """The standbys of a rank that has started none."""
    return Standbys(ON, 2, Path("/logs"), lambda: pytest.fail("no store is needed"))


class IdleProcessor:
    """A processor of which it is known whether the controller has let it go."""

    def __init__(self, settled: bool) -> None:
        self._settled = settled

    def wait_for_verdict(self, timeout_s: float) -> bool:
        return self._settled

    def stop(self) -> None: ...


@pytest.mark.parametrize("settled", [True, False])
def test_a_controller_that_others_may_need_is_neither_ended_nor_waited_for(
    settled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that stays although the job is over is unusual, and reported."""
    protected = object.__new__(rank_runtime.Protection)
    asked = AskedController()
    controller = JobController(ON, Path("/logs"), 0, 2)
    controller._process = asked  # type: ignore[assignment]
    parts = {"_controller": controller, "processor": IdleProcessor(settled), "_notice": Notice(print)}
    for name, part in (parts | {"_standbys": no_standbys()}).items():
        setattr(protected, name, part)
    protected.close()
    assert asked.asked == (["10 s"] if settled else [])
    assert ("controller (pid 71) has not ended within 10 s" in caplog.text) is settled


@pytest.mark.parametrize("settled", [True, False])
def test_a_standby_is_dismissed_only_when_the_job_is_settled(settled: bool) -> None:
    """The other ranks may still have to come to it, or have come: then it stays."""
    protected = object.__new__(rank_runtime.Protection)
    standby, standbys = AskedController(), no_standbys()
    standbys.running.append(standby)  # type: ignore[arg-type]
    parts = {"_standbys": standbys, "processor": IdleProcessor(settled), "_notice": Notice(print)}
    for name, part in (parts | {"_controller": JobController(ON, Path("/logs"), 1, 2)}).items():
        setattr(protected, name, part)
    protected.close()
    assert standby.asked == (["dismiss", "10 s"] if settled else [])


def test_a_second_call_of_train_is_refused(tmp_path: Path) -> None:
    """After the first return the ranks have parted: nothing would be protected."""
    model, optimizer, session = new_run(tmp_path, ON)
    train = ttp.ttp_to_persist(do_steps)
    train(model, optimizer, session, 2)
    with pytest.raises(ConfigError, match="was called again"):
        train(model, optimizer, session, 4)
    assert optimizer.current_step == 2


def test_resume_comes_before_the_first_step(tmp_path: Path) -> None:
    """Loading under a running protocol would change state behind the gate."""
    model, optimizer, session = new_run(tmp_path, OFF)
    do_steps(model, optimizer, session, 1)
    with pytest.raises(ConfigError, match="resume after step 1"):
        session.resume()


def test_a_rank_registers_with_the_step_that_its_trainer_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A freeze that comes at once is answered with the step that was registered: the gate begins there."""
    begun: list[tuple[int, int, int]] = []

    class Watched(Processor):
        def start(self) -> None:
            begun.append((self._holder.registration().state_step, self._gate.state_step, self._gate.step))
            super().start()

    monkeypatch.setattr(rank_runtime, "Processor", Watched)
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    optimizer.count_from(40)
    session = ttp.start(optimizer, save_dirs=[tmp_path], settings=ON)
    assert begun == [(40, 40, 41)]
    ttp.ttp_to_persist(do_steps)(model, optimizer, session, 41)
    assert optimizer.current_step == 41


def test_saving_and_resuming_work_without_protection(tmp_path: Path) -> None:
    """ENABLE_TTP=False: no controller, the same checkpoints."""
    model, optimizer, session = new_run(tmp_path, OFF)
    assert not session.protected
    do_steps(model, optimizer, session, 3)
    assert Path(session.save()).name == "iter_0000003"
    session.close()
    model, optimizer, session = new_run(tmp_path, OFF, seed=1)
    point = session.resume()
    assert point is not None and (point.step, point.state) == (3, {"position": 6})
    assert not (tmp_path / "ttp_log").exists()


def test_a_save_falls_through_to_the_next_directory_and_leaves_no_staging_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then, with no directory left, it says so."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    session = ttp.start(optimizer, save_dirs=[tmp_path / "a", tmp_path / "b"], settings=OFF)
    do_steps(model, optimizer, session, 1)
    from ttp.checkpoint.publish import publish

    publish, refused = publish, [str(tmp_path / "a")]

    def full(directory: str, *args: object, **kwargs: object) -> str:
        if directory in refused:
            raise NotWritable(f"{directory} is full")
        return publish(directory, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("ttp.checkpoint.store.publish", full)
    assert session.save() == str(tmp_path / "b" / "iter_0000001")
    refused.append(str(tmp_path / "b"))
    with pytest.raises(CheckpointError, match=r"no directory took the requested checkpoint.*a is full.*b is full"):
        session.save()
    assert [p.name for p in find.list_checkpoints([tmp_path / "a", tmp_path / "b"])] == ["iter_0000001"]
    assert not list(tmp_path.glob("*/*_tmp*"))


def test_a_restart_goes_on_without_a_directory_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Full, say, as the fault was that it comes from: the other one has the step. A job's first start is refused."""
    from ttp.checkpoint.staging import probe_writable

    probe, save_dirs = probe_writable, [tmp_path / "a", tmp_path / "b"]

    def full(directory: str) -> None:
        if directory == str(tmp_path / "a"):
            raise NotWritable(f"{directory} is full")
        probe(directory)

    monkeypatch.setattr("ttp.runtime.directory_agreement.probe_writable", full)
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    with pytest.raises(NotWritable, match="a is full"):
        ttp.start(optimizer, save_dirs=save_dirs, settings=OFF)
    with caplog.at_level("WARNING", logger="ttp"):
        session = ttp.start(optimizer, save_dirs=save_dirs, settings=replace(OFF, round_number=1))
    assert f"continuing without a directory: rank 0: {tmp_path / 'a'} is full" in caplog.text
    do_steps(model, optimizer, session, 1)
    assert session.save()


def test_one_session_a_process(tmp_path: Path) -> None:
    """The second call says what to do."""
    _, optimizer, session = new_run(tmp_path, OFF)
    with pytest.raises(ConfigError, match="called twice"):
        ttp.start(optimizer, save_dirs=[tmp_path], settings=OFF)
    assert ttp.current_session() is session
    session.close()
    with pytest.raises(ConfigError, match=r"call ttp\.start"):
        ttp.current_session()


def test_a_process_of_an_earlier_attempt_is_none_of_a_later_one() -> None:
    """Controllers refuse the messages of another job; under ttprun every attempt is one. torchrun's nodes may count differently."""
    run = {"TORCHELASTIC_RUN_ID": "run", "TTP_ATTEMPT": "0"}
    first, second = (Settings.from_env({**run, "TTP_LAUNCHED": "1", "TTP_ATTEMPT": number}) for number in "01")
    assert first.start_name != second.start_name
    assert Settings.from_env(run).start_name == "run"


FORKS = """
import os, sys, torch, ttp
model = torch.nn.Linear(8, 4)
optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
session = ttp.start(optimizer, save_dirs=[sys.argv[1]])
child = os.fork()
if child == 0:
    session.close()
    os._exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ttp.current_session() is session)
session.close()
"""


def test_a_forked_child_closes_nothing(tmp_path: Path) -> None:
    """It has none of the session's threads: there is none that could end its wait."""
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    environ = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}  # as under ttprun
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "child 7 True\n"), done.stderr


@pytest.mark.parametrize(("exc", "counts"), [(SystemExit(0), False), (SystemExit(3), True), (KeyError("x"), True)])
def test_an_exception_on_its_way_counts_unless_it_is_a_good_end(
    tmp_path: Path, exc: BaseException, counts: bool
) -> None:
    """`sys.exit()` in the middle of a `finally` that closes."""
    _, _, session = new_run(tmp_path, OFF)
    with contextlib.suppress(BaseException):
        try:
            raise exc
        finally:
            assert session.exception_on_its_way() == (exc if counts else None)
            session.close()


def test_a_traceback_that_a_thread_prints_ends_nothing(tmp_path: Path) -> None:
    """A recipe for threads is to call `sys.excepthook` with their exceptions."""
    _, _, session = new_run(tmp_path, ON)

    def fail() -> None:
        try:
            raise KeyError("of a thread")
        except KeyError:
            sys.excepthook(*sys.exc_info())

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert not session.raised
    session.close()
    assert '"fault_reported"' not in (tmp_path / "ttp_log" / "journal_0.jsonl").read_text()
