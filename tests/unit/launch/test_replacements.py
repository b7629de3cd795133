"""Single processes of a running attempt are replaced: the real agent, forked workers, and the test in the controller's place."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from tests.unit.launch.agent_jobs import RunningJob, running_job
from tests.waiting import LONG_S, until
from ttp.exchange.discovery import log_dir_key
from ttp.fork_server.client import Program
from ttp.fork_server.forked_process import ForkedChild
from ttp.launch.agent import HoldAgent
from ttp.launch.attempts import replacements
from ttp.launch.attempts.copies import Copies
from ttp.launch.attempts.replacements import END_S
from ttp.launch.links.controller_client import ControllerClient
from ttp.launch.report.reporter import Reporter
from ttp.launch.watch.death_watch import Death
from ttp.launch.watch.processes import LOST, exit_status, read_stat
from ttp.launch.watch.shell_ranks import _Rank
from ttp.proto.messages import Thaw

pytestmark = pytest.mark.filterwarnings("ignore:.*_io.FileIO.*log", "ignore:unclosed file.*log:ResourceWarning")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[RunningJob]:
    caplog.set_level(logging.INFO, "ttp.launch")
    with running_job(tmp_path, monkeypatch) as job:
        yield job


def test_a_process_that_is_started_is_given_the_address_of_the_controller_that_leads(job: RunningJob) -> None:
    """After a takeover the store still has the first one's. It holds nothing until the gates open."""
    job.line.leader = "127.0.0.1:4001"
    pid = job.replaced(1, freeze_id=7)
    assert job.said(1, pid)["environ"]["TTP_VACANT"] == "7 127.0.0.1:4001"
    assert job.attempt._replacements.vacant() == {1}
    job.attempt._replacements.take(Thaw(7))
    assert job.attempt._replacements.vacant() == set()
    job.succeed()


def test_another_process_takes_the_place_of_one_that_has_ended(
    job: RunningJob, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the program, the variables and the log files of the first, and the number of the freeze; the first is gone. torch sees neither a failure nor a
    restart, and the job succeeds."""
    first, pid = job.pids[1], job.replaced(1, freeze_id=7)
    before, now = job.said(1, first), job.said(1, pid)
    assert now["beside"] == [] and not now["error_file"] and now["argv"] == before["argv"]
    assert now["environ"] == before["environ"] | {"TTP_VACANT": "7"} and now["parent"] == os.getpid()
    assert (
        job.attempt.pids == {0: job.pids[0], 1: pid} and job.attempt.living() == [0, 1] and job.attempt.deaths() == {}
    )
    assert job.line.replacements == [(1, pid)] and job.line.refusals == []
    until(lambda: exit_status(first) is LOST, "the first process to be reaped")
    job.succeed()
    assert job.error is None and job.result is not None and job.result.state is WorkerState.SUCCEEDED
    assert job.agent._remaining_restarts == 2 and job.rendezvous.job_store.round_number == 0
    out, err = (next((job.out / "logs").rglob(f"attempt_0/1/{name}.log")).read_text() for name in ("stdout", "stderr"))
    assert out == f"rank 1, process {first}\nrank 1, process {pid}\n" and err.count("errors of process") == 2


def test_an_order_may_overtake_the_death_that_it_answers(job: RunningJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch reports a death before it shows it: the controller may decide and order while that thread does not run."""
    watch = job.attempt._watch
    report, wait, waits = watch._report, watch.wait, threading.Event()

    def report_slowly(death: Death) -> None:
        report(death)
        if not waits.is_set():
            job.order(1, freeze_id=7)
            until(lambda: waits.is_set() or bool(job.line.refusals), "the order to be taken")

    def note(timeout_s: float, is_true: Callable[[dict[int, Death]], bool]) -> bool:
        if threading.current_thread().name == "ttp-replacements":
            waits.set()
        return wait(timeout_s, is_true)

    monkeypatch.setattr(watch, "_report", report_slowly)
    monkeypatch.setattr(watch, "wait", note)
    first = job.pids[1]
    os.kill(first, signal.SIGKILL)  # its death may be forgotten already, as the order comes before it is shown
    until(lambda: bool(job.line.refusals) or job.attempt.pids[1] != first, "an answer")
    assert job.line.refusals == [] and job.attempt.pids[1] == job.process(1, first)


def test_a_death_that_is_shown_between_the_two_looks_is_seen(job: RunningJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small process is seen to begin to exit and to have ended at once: then it is in one of the two lists at a time."""
    watch = job.attempt._watch
    report, asked = watch._report, threading.Event()

    def report_slowly(death: Death) -> None:
        report(death)
        if not asked.is_set():
            assert death.settled
            job.order(1, freeze_id=7)
            assert asked.wait(LONG_S)

    def between(real: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            found = real()
            if threading.current_thread().name == "ttp-replacements" and not asked.is_set():
                asked.set()
                until(lambda: 1 in watch._deaths and watch._deaths[1].settled, "the death to be shown")
            return found

        return call

    monkeypatch.setattr(watch, "_report", report_slowly)
    monkeypatch.setattr(watch, "deaths", between(watch.deaths))
    monkeypatch.setattr(watch, "begun", between(watch.begun))
    first = job.pids[1]
    with watch._changed:  # the watch looks only once the process has ended
        os.kill(first, signal.SIGKILL)
        until(lambda: exit_status(first) is not None, "its end")
    until(lambda: bool(job.line.refusals) or job.attempt.pids[1] != first, "an answer")
    assert job.line.refusals == [] and job.attempt.pids[1] == job.process(1, first)


@contextlib.contextmanager
def asleep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunningJob]:
    """Yield a job whose agent's main thread sleeps meanwhile."""
    asleep, wake = threading.Event(), threading.Event()

    def sleep(self: HoldAgent, group: object) -> RunResult:
        if not wake.is_set():
            asleep.set()
            wake.wait()
        return monitor(self, group)  # type: ignore[arg-type]

    monitor = HoldAgent._monitor_workers
    monkeypatch.setattr(HoldAgent, "_monitor_workers", sleep)
    with running_job(tmp_path, monkeypatch) as job:
        assert asleep.wait(30.0)
        try:
            yield job
        finally:
            wake.set()


def test_an_order_does_not_wait_for_the_agents_main_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asleep(monkeypatch, tmp_path) as job:
        pid = job.replaced(1)
        assert job.attempt.pids[1] == pid and job.attempt.fault is None


class Certificates:
    """Records when certificates wait for a worker, and which workers they are for."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self.said: list[tuple[dict[int, int] | None, int]] = []
        """Each with how many processes rank 1 has had by then."""

    def starting(self) -> None:
        self.said.append((None, len(self._job._processes(1))))

    def started(self, pids: Mapping[int, int]) -> None:
        self.said.append((dict(pids), 0))


@pytest.mark.parametrize("fails", [False, True])
def test_certificates_wait_for_the_process_that_is_being_started(job: RunningJob, fails: bool) -> None:
    """It may ask before the agent knows its number. The others get theirs, whatever comes of it."""
    certificates = Certificates(job)
    job.attempt._replacements._identities = certificates  # type: ignore[assignment]
    first = dict(job.attempt.pids)
    job.kill(1)
    if fails:
        job.servers.workers.close()
    job.order(1)
    until(lambda: len(certificates.said) == 2, "both words")
    assert certificates.said[0] == (None, 1)
    assert certificates.said[1][0] == (first if fails else {0: first[0], 1: job.process(1, first[1])})


def test_what_the_kernel_kills_of_a_later_process_is_explained_too(job: RunningJob) -> None:
    """By the count of its own cgroup."""
    assert job.replaced(1) in job.attempt._memory._counters


def test_the_hold_ends_when_all_that_had_failed_were_replaced(
    job: RunningJob, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent watches on; nothing is counted, and no worker is ended."""
    job.kill(1)
    until(lambda: "holding rank 0" in caplog.text, "the hold")
    job.order(1)
    pid = job.process(1, job.pids[1])
    until(lambda: "other processes took the place of all that had failed" in caplog.text, "the end of the hold")
    until(lambda: job.attempt.fault is None, "no fault")
    job.succeed()
    assert job.result is not None and job.result.state is WorkerState.SUCCEEDED
    assert job.agent._pids == {0: job.pids[0], 1: pid} and "restarting" not in caplog.text


def test_a_process_that_has_lost_its_state_is_killed_first_without_a_failure(
    job: RunningJob, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent does not hold the others for it, and the controller receives no failure of the process that follows."""
    first = job.pids[1]
    job.order(1, pid=first)
    pid = job.process(1, first)
    assert job.said(1, pid)["beside"] == []
    until(lambda: job.attempt.living() == [0, 1] and job.attempt.pids[1] == pid, "the other process")
    assert {report[:2] for report in job.line.exits} == {(1, first)}
    job.succeed()
    assert job.result is not None and job.result.state is WorkerState.SUCCEEDED
    assert "holding" not in caplog.text


def test_a_process_that_is_killed_is_asked_where_it_is_before(
    job: RunningJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has ended by itself is not."""
    first, asked = job.pids[1], []

    def ask(log_dir: Path, pids: Mapping[int, int], within_s: float) -> None:
        asked.append((log_dir, dict(pids), within_s < END_S and read_stat(first) is not None))

    monkeypatch.setattr(replacements, "ask", ask)
    monkeypatch.setattr(ControllerClient, "log_dir", property(lambda self: tmp_path))
    job.order(1, pid=first)
    pid = job.process(1, first)
    until(lambda: job.attempt.pids[1] == pid and job.attempt.living() == [0, 1], "the other process to be watched")
    job.replaced(1, freeze_id=2)
    assert asked == [(tmp_path, {1: first}, True)]
    job.succeed()


def test_an_attempt_goes_on_while_its_only_running_worker_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of the first process and the fork of the other one no worker runs, and none has failed."""
    begun, go_on = threading.Event(), threading.Event()
    with running_job(tmp_path, monkeypatch, max_restarts=0) as job:
        fork, first = job.servers.workers.fork_one, job.pids[1]

        def slow(program: Program) -> ForkedChild:
            begun.set()
            assert go_on.wait(30.0)
            return fork(program)

        monkeypatch.setattr(job.servers.workers, "fork_one", slow)
        job.exit(job.pids[0], 0)
        until(lambda: job.attempt.living() == [1], "rank 0's end")
        job.order(1, pid=first)
        assert begun.wait(30.0)
        looks = iter(range(3))
        monitor = HoldAgent._monitor_workers
        seen = threading.Event()

        def count(self: HoldAgent, group: object) -> RunResult:
            if next(looks, None) is None:
                seen.set()
            return monitor(self, group)  # type: ignore[arg-type]

        monkeypatch.setattr(HoldAgent, "_monitor_workers", count)
        until(lambda: seen.is_set() or job.attempt._replacements._stopped, "the agent to look")
        assert job.attempt.living() == [] and job.attempt.settling() and not job.attempt._replacements._stopped
        go_on.set()
        job.exit(job.process(1, first), 0)
        job.thread.join(30.0)
        assert job.result is not None and job.result.state is WorkerState.SUCCEEDED


def test_an_order_that_is_repeated_is_carried_out_once(job: RunningJob) -> None:
    """So is an older one that comes late."""
    pid = job.replaced(1, freeze_id=5)
    for freeze_id in (5, 4):
        job.order(1, freeze_id=freeze_id)
    job.order(0, freeze_id=6)  # refused, so that the test sees that the others have been looked at
    until(lambda: job.line.refusals, "the answer to the last one")
    assert [refusal[:2] for refusal in job.line.refusals] == [(0, 6)] and job.attempt.pids[1] == pid
    job.order(0, freeze_id=6)
    until(lambda: len(job.line.refusals) == 2, "the same answer")
    assert job.line.refusals[0] == job.line.refusals[1]


def test_a_process_that_was_replaced_can_be_replaced_again(job: RunningJob) -> None:
    """In another freeze."""
    second = job.replaced(1, freeze_id=1)
    third = job.replaced(1, freeze_id=2)
    assert len({job.pids[1], second, third}) == 3 and job.said(1, third)["environ"]["TTP_VACANT"] == "2"
    until(lambda: exit_status(second) is LOST, "the second process to be reaped")


@pytest.mark.parametrize("thawed", [False, True])
def test_the_death_of_a_replacement_is_an_ordinary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thawed: bool
) -> None:
    """The job fails by it. The controller may not know that process yet: the agent reports once that the order has failed after all, unless the
    gates were opened since."""
    with running_job(tmp_path, monkeypatch, max_restarts=0) as job:
        pid = job.replaced(1, freeze_id=3)
        if thawed:
            assert job.workers is not None
            job.workers.take(Thaw(3))
        job.exit(pid, 3)
        until(job.attempt.failed, "its end to be seen")
        job.exit(job.pids[0], 75)
        job.thread.join(60.0)
        assert job.result is not None and job.result.state is WorkerState.FAILED
        assert (job.result.failures[1].pid, job.result.failures[1].exitcode) == (pid, 3)
        said = [(rank, freeze_id) for rank, freeze_id, _ in job.line.refusals]
        assert said == ([] if thawed else [(1, 3)])
        assert {(rank, process) for rank, process, _ in job.line.exits} == {
            (0, job.pids[0]),
            (1, job.pids[1]),
            (1, pid),
        }


def test_what_the_first_process_has_left_in_its_session_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As data loaders, which would keep memory and connections. Those of the other processes stay."""
    with running_job(tmp_path, monkeypatch, "helper") as job:
        helpers = {rank: job.said(rank, job.pids[rank])["helper"] for rank in range(2)}
        pid = job.replaced(1)
        until(lambda: gone(helpers[1]), "the first process's helper to end")
        assert not gone(helpers[0]) and not gone(job.said(1, pid)["helper"])


def gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.gone


def test_what_the_agent_cannot_do_it_refuses_at_once(job: RunningJob) -> None:
    """With one reason each; nothing is ended."""
    line, refused = job.line, 0

    def refusal(rank: int, pid: int = 0) -> str:
        nonlocal refused
        refused += 1
        job.order(rank, pid, freeze_id=refused)
        until(lambda: len(line.refusals) == refused, "an answer")
        assert line.refusals[-1][:2] == (rank, refused)
        return line.refusals[-1][2]

    assert refusal(1) == f"process {job.pids[1]} of rank 1 has not ended"
    assert refusal(1, job.pids[0]) == f"process {job.pids[0]} was to be ended, rank 1 is process {job.pids[1]}"
    assert refusal(7) == "rank 7 is not on this node"
    shells = job.attempt._behind_shells
    shells._found = {1: _Rank(job.pids[1], 1, "")}
    assert refusal(1, job.pids[1]) == "rank 1 was started by its worker"
    shells._found = {}
    line.sent_away_monotonic_s = 1.0
    assert refusal(1, job.pids[1]) == "the ranks were ordered to exit"
    line.sent_away_monotonic_s = None
    job.attempt._replacements._copies = copies = Copies()
    for name in ("rank 1", "save of rank 1"):
        copies._owner.obtain(name, 4096, 4096)
        assert refusal(1, job.pids[1]).startswith("rank 1 has copies or a save in this agent's memory")
        copies._owner.drop({name})
    copies.close()
    job.servers.workers.close()
    job.kill(1)
    assert "fork server" in refusal(1) and job.attempt.failed()
    assert job.attempt.living() == [0]


def test_a_process_that_has_succeeded_is_not_begun_again(job: RunningJob) -> None:
    """A controller that leads none of the job's own ranks takes it for dead."""
    job.exit(job.pids[1], 0)
    until(lambda: 1 in job.attempt.deaths() and job.attempt.deaths()[1].settled, "its status")
    job.order(1, freeze_id=1)
    until(lambda: len(job.line.refusals) == 1, "an answer")
    assert job.line.refusals == [(1, 1, f"process {job.pids[1]} of rank 1 has succeeded")]
    assert job.attempt.pids[1] == job.pids[1]


@pytest.mark.parametrize("what", ["script", "server"])
def test_a_process_that_would_run_other_code_than_the_others_is_not_started(job: RunningJob, what: str) -> None:
    """The script was edited meanwhile, or another fork server has imported the modules as they are now."""
    if what == "script":
        with (job.out / "script.py").open("a") as file:
            file.write("# edited\n")
    else:
        server = job.servers.workers
        os.kill(server.pid, signal.SIGKILL)
        before = server.pid
        until(lambda: server.pid not in (0, before), "another server")
    job.kill(1)
    job.order(1)
    until(lambda: job.line.refusals, "an answer")
    assert job.line.refusals[0][2] == (
        "the fork server was lost since the workers were started, or their script has changed"
    )


def test_an_attempt_that_ends_takes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the beginning of the end: the ranks receive SIGTERM and save."""
    with asleep(monkeypatch, tmp_path) as job:
        job.kill(1)
        job.attempt.drain("the agent is shutting down")
        job.order(1)
        until(lambda: job.line.refusals, "an answer")
        assert job.line.refusals == [(1, 1, "the agent is shutting down")] and job.attempt.living() == []


def test_the_end_of_an_attempt_waits_for_the_process_that_is_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would outlive the attempt otherwise. It is ended with the others."""
    begun, go_on = threading.Event(), threading.Event()
    with running_job(tmp_path, monkeypatch, max_restarts=0) as job:
        fork, attempt = job.servers.workers.fork_one, job.attempt

        def slow(program: Program) -> ForkedChild:
            begun.set()
            assert go_on.wait(30.0)
            return fork(program)

        monkeypatch.setattr(job.servers.workers, "fork_one", slow)
        job.kill(1)
        job.order(1)
        assert begun.wait(30.0)
        ending = threading.Thread(target=attempt.end_workers, args=(signal.SIGKILL, 0.0))
        ending.start()
        until(lambda: attempt._replacements._stopped, "the end to begin")
        assert exit_status(job.pids[0]) is None
        go_on.set()
        ending.join(30.0)
        job.thread.join(30.0)
        pid = attempt.pids[1]
        assert pid != job.pids[1] and gone(pid)
        assert job.result is not None and job.result.failures[1].pid == pid


@pytest.mark.parametrize("warm", [False, True], ids=["executed", "torch polls them"])
def test_workers_that_cannot_be_forked_again_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """Another one would import for seconds, in which a shard may have one holder. Where torch polls the workers it would reap the first one, and end all."""
    if warm:
        monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "600")
    with running_job(tmp_path, monkeypatch, warm=warm) as job:
        job.kill(1)
        job.order(1)
        until(lambda: job.line.refusals, "an answer")
        assert [refusal[2][:25] for refusal in job.line.refusals] == ["the workers were executed"]
        assert job.attempt.failed()


@pytest.mark.parametrize("thawed", [False, True])
def test_a_second_failure_has_the_first_ones_deadline_until_the_gates_have_opened(
    job: RunningJob, thawed: bool
) -> None:
    """A fault of several rounds ends within TTP_OT of its begin."""
    job.kill(1)
    seen_s = job.attempt.deaths()[1].seen_monotonic_s
    until(lambda: job.attempt.fault is not None, "the first hold")
    job.order(1)
    pid = job.process(1, job.pids[1])
    until(lambda: job.attempt.living() == [0, 1] and job.attempt.fault is None, "the recovery")
    if thawed:
        assert job.workers is not None
        job.workers.take(Thaw(1))
    os.kill(pid, signal.SIGKILL)
    until(lambda: job.attempt.fault is not None, "the second hold")
    fault = job.attempt.fault
    assert fault is not None and fault.deadline_monotonic_s == fault.begun_monotonic_s + 60.0
    assert (fault.begun_monotonic_s == seen_s) is not thawed and fault.begun_monotonic_s >= seen_s


def test_the_journals_are_looked_at_while_the_job_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a fault from which it has recovered, and for slow ranks."""
    reporter = Reporter(tmp_path / "story.jsonl")
    followed: list[Path] = []
    monkeypatch.setattr(reporter, "follow", lambda attempt, log_dir: followed.append(log_dir))
    with running_job(tmp_path, monkeypatch, reporter=reporter) as job:
        store = job.rendezvous.job_store
        client = TCPStore(store.host, store.port, is_master=False)
        client.set(log_dir_key(store.round_number), str(tmp_path))
        until(lambda: len(followed) > 1, "a second look into the journals")
        job.succeed()
