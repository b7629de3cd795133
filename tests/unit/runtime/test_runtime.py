"""A controller in its own process, ranks in threads, gRPC between them: a fault from its report to the exit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gates import thaw
from ttp.controller.agent_link import AgentLink, request_shutdown, request_status
from ttp.controller.core.facts.events import ControllerSettings, HeartbeatBatch, Received
from ttp.controller.core.facts.events import Journal as JournalEffect
from ttp.controller.core.machine import transition
from ttp.controller.journal import inputs_path, read_events, read_inputs, replay
from ttp.controller.process import CannotListen, ControllerProcess, start_controller
from ttp.errors import ControllerError, NotWritable, TornShare
from ttp.proto.address import split_address
from ttp.proto.messages import Cause, CauseKind, CommitRecord, Heartbeat, Phase, PublishOrder
from ttp.proto.stream import ControlStream

from .conftest import LONG_S, Rank, StartController, StartRanks, commit_record, until


def logged_events(controller: ControllerProcess, tmp_path: Path) -> list[str]:
    controller.wait(LONG_S)
    return [line.event for line in read_events(tmp_path / "journal0.jsonl")]


def test_a_fault_is_carried_from_the_agents_report_to_the_exit(
    new_controller: StartController, new_ranks: StartRanks, tmp_path: Path
) -> None:
    """Rank 1 dies. Rank 2 had updated step 3, rank 0 was READY(3): it rolls forward with rank 2's record; then both write,
    one publishes, and both leave with status 75."""
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    agent = AgentLink(controller.address, "job", "host", (0, 1, 2), (1000, 1001, 1002))
    for rank in ranks:
        rank.train_to(2)
    ranks[2].train_to(3)
    ranks[0].gate.computing(3)
    ranks[0].gate.ready(3)
    agent.worker_exit(1, 1001, "signal SIGKILL")
    for rank in (ranks[0], ranks[2]):
        assert rank.exited.wait(LONG_S)
        assert rank.exit_code == 75
    assert ranks[0].holder.rolled == [commit_record(3)]
    assert ranks[2].holder.rolled == []
    parts = [part for rank in (ranks[0], ranks[2]) for order in rank.holder.written for part in order.parts]
    assert {part.group_id for part in parts} == {"g0", "g1", "g2"}
    assert len(set(parts)) == len(parts), "each part is written once"
    (order,) = ranks[0].holder.published + ranks[2].holder.published
    assert order.step == 3 and order.record == commit_record(3)
    assert order.cause.ranks == (1,) and "SIGKILL" in order.cause.text
    assert not thaw(ranks[0].gate, 1), "the gate stays closed after a roll forward"
    agent.close()
    ranks[1].processor.stop()
    events = logged_events(controller, tmp_path)
    expected = ["assembled", "death_seen", "freeze_sent", "frozen", "decided", "write_sent", "published", "exit_sent"]
    assert [event for event in events if event in expected][: len(expected)] == expected


def test_an_update_that_outlasts_the_freeze_is_saved_once_it_ends(
    new_controller: StartController, new_ranks: StartRanks, tmp_path: Path
) -> None:
    """Rank 1 dies while rank 0, which holds the same shards, updates for longer than a freeze waits."""
    controller = new_controller(world_size=2)
    ranks = new_ranks(controller.address, 2, freeze_timeout_s=0.2)
    for rank in ranks:
        rank.train_to(3)
    gate = ranks[0].gate
    gate.computing(4)
    gate.ready(4)
    gate.begin_update(4, commit_record(4))
    agent = AgentLink(controller.address, "job", "host", (1,), (1001,))
    agent.worker_exit(1, 1001, "signal SIGKILL")
    journal = tmp_path / "journal0.jsonl"
    until(lambda: "awaiting_updates" in [line.event for line in read_events(journal)], "the controller to wait")
    gate.end_update(4)
    assert ranks[0].exited.wait(LONG_S)
    (order,) = ranks[0].holder.published
    assert order.step == 4
    agent.close()
    ranks[1].processor.stop()


def test_a_recorded_run_replays_to_the_same_effects(
    new_controller: StartController, new_ranks: StartRanks, tmp_path: Path
) -> None:
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(1)
    agent = AgentLink(controller.address, "job", "host", (1,), (1001,))
    agent.worker_exit(1, 1001, "signal SIGKILL")
    assert ranks[0].exited.wait(LONG_S) and ranks[2].exited.wait(LONG_S)
    agent.close()
    for rank in ranks:
        rank.processor.stop()
    reported = logged_events(controller, tmp_path)
    recording = read_inputs(inputs_path(tmp_path / "journal0.jsonl"))
    assert recording.settings.world_size == 3
    replayed = [
        effect.event
        for _, _, _, effects in replay(recording, transition)
        for effect in effects
        if isinstance(effect, JournalEffect)
    ]
    assert replayed == reported


def test_a_killed_process_freezes_the_others_at_once(
    new_controller: StartController, new_ranks: StartRanks, tmp_path: Path
) -> None:
    """The broken stream alone closes the survivors' gates, long before the lease says that the rank is dead."""
    controller = new_controller(world_size=3, lease_s=2.0)
    victim = subprocess.Popen([sys.executable, str(Path(__file__).with_name("rank_process.py")), controller.address])
    before = set(threading.enumerate())
    others = [Rank(rank, 3, controller.address, str(tmp_path)) for rank in (0, 1)]
    try:
        for rank in others:
            assert rank.processor.wait_welcomed(LONG_S) is not None
            rank.train_to(1)
        killed_at = time.monotonic()
        victim.kill()
        until(lambda: all(rank.gate.closed for rank in others), "both gates closed")
        print(f"from SIGKILL to both gates closed: {(time.monotonic() - killed_at) * 1e3:.1f} ms")
        assert all(rank.exited.wait(LONG_S) for rank in others)
        assert [rank.exit_code for rank in others] == [75, 75]
    finally:
        victim.kill()
        victim.wait()
        for rank in others:
            rank.processor.stop()
        for thread in set(threading.enumerate()) - before:
            thread.join(LONG_S)
    reported = logged_events(controller, tmp_path)
    assert reported.index("freeze_sent") < reported.index("death_seen"), "it waited for the lease"


def test_a_rank_whose_stream_only_broke_thaws_everyone(
    new_controller: StartController, new_ranks: StartRanks, tmp_path: Path
) -> None:
    """A false alarm: the rank comes back within its lease, and training continues unharmed."""
    controller = new_controller(lease_s=20.0)
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(1)
    stream = ranks[1].processor._handler.stream
    assert stream is not None
    stream.close()
    until(lambda: "thawed" in {line.event for line in read_events(tmp_path / "journal0.jsonl")}, "thawed")
    trainers = [threading.Thread(target=rank.train_to, args=(5,), daemon=True) for rank in ranks]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(LONG_S)
        assert not trainer.is_alive()
    assert [rank.gate.state_step for rank in ranks] == [5, 5, 5]
    assert all(rank.exit_code is None for rank in ranks)


def test_an_exception_is_reported_and_its_rank_stays_as_a_holder(
    new_controller: StartController, new_ranks: StartRanks
) -> None:
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(2)
    ranks[1].processor.release_at_exit()
    ranks[1].processor.fault(Cause(CauseKind.EXCEPTION, (1,), "ValueError: bad batch"), "traceback")
    ranks[1].processor.wait_for_verdict()
    assert ranks[1].exit_code is None, "released: it has its own exception to show"
    assert ranks[0].exited.wait(LONG_S) and ranks[2].exited.wait(LONG_S)
    published = [order for rank in ranks for order in rank.holder.published]
    assert [order.step for order in published] == [2]
    assert published[0].cause.kind is CauseKind.EXCEPTION


def test_ranks_that_finish_are_held_until_all_have_and_then_released(
    new_controller: StartController, new_ranks: StartRanks
) -> None:
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks[:2]:
        rank.processor.finished()
    assert ranks[0].processor.controller == controller.address
    until(lambda: [r.finished for r in request_status(controller.address).ranks] == [True, True, False], "two ends")
    assert not any(rank.processor.wait_for_verdict(0.0) for rank in ranks)
    ranks[2].processor.finished()
    for rank in ranks:
        assert rank.processor.wait_for_verdict(LONG_S)
    for rank in ranks:
        rank.processor.stop()
    assert controller.wait(LONG_S) == 0, "the controller ends by itself"


def test_the_status_says_where_everyone_is(new_controller: StartController, new_ranks: StartRanks) -> None:
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(4)
    until(
        lambda: all((r.step, r.phase) == (4, Phase.DONE) for r in request_status(controller.address).ranks),
        "heartbeats behind step 4",
    )
    status = request_status(controller.address, job_id="job")
    assert (status.job_id, status.term, status.world_size, status.stage) == ("job", 1, 3, "running")
    assert status.pid == controller.pid and status.survives and status.published is None
    assert [(r.rank, r.host, r.pid, r.attached, r.phase, r.dead) for r in status.ranks] == [
        (rank, f"host{rank}", 1000 + rank, True, Phase.DONE, False) for rank in range(3)
    ]
    with pytest.raises(ControllerError, match="not of 'other'"):
        request_status(controller.address, job_id="other")


def test_a_taken_port_is_a_clear_error(new_controller: StartController, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ControllerError, match="TTP_CONTROLLER_PORT") as error:
            new_controller(port=port, port_wait_s=0.3)
    assert f"127.0.0.1:{port}" in str(error.value)
    first = new_controller(port=port)
    with pytest.raises(ControllerError, match="TTP_CONTROLLER_PORT"):
        new_controller(port=port, journal=tmp_path / "second.jsonl", port_wait_s=0.3)
    assert request_status(first.address).pid == first.pid


def test_a_port_that_is_being_left_is_waited_for(new_controller: StartController, tmp_path: Path) -> None:
    """A restart comes while the controller of the attempt before may still hold its port."""
    first = new_controller()
    port = int(split_address(first.address)[0].rpartition(":")[2])
    leaving = threading.Timer(0.5, first.terminate)
    leaving.start()
    second = new_controller(port=port, journal=tmp_path / "second.jsonl", term=2)
    leaving.join()
    assert request_status(second.address).term == 2


def test_a_journal_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    folder, file = tmp_path / "folder", tmp_path / "file"
    with pytest.raises(NotWritable, match="cannot write the journal"):
        start_controller(ControllerSettings("job", 1, 1), folder)
    with pytest.raises(NotWritable, match=rf"log directory {file} cannot be written: File exists"):
        start_controller(ControllerSettings("job", 1, 1), file / "journal.jsonl")


def test_a_port_that_is_taken_is_distinguished_from_other_failures_of_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"^the controller cannot listen on 127.0.0.1:{port}: the port is taken"):
            start_controller(ControllerSettings("job", 1, 1), tmp_path / "j", port=port, port_wait_s=0.1)


def test_ctrl_c_leaves_the_controller_alone_and_sigterm_ends_it(new_controller: StartController) -> None:
    controller = new_controller()
    assert os.getsid(controller.pid) == controller.pid, "a session of its own"
    os.kill(controller.pid, signal.SIGINT)
    assert request_status(controller.address).stage == "assembling"
    controller.terminate()
    assert controller.wait(LONG_S) == 0


def test_sigterm_ends_a_controller_only_when_its_ranks_have_gone(
    new_controller: StartController, tmp_path: Path
) -> None:
    """A scheduler may tell all processes of a job at once to leave: the ranks need this one to save."""
    controller = new_controller(world_size=1)
    rank = Rank(0, 1, lambda: controller.address, str(tmp_path))
    assert rank.processor.wait_welcomed(LONG_S) is not None
    controller.terminate()
    until(lambda: any(line.event == "stays" for line in read_events(tmp_path / "journal0.jsonl")), "its word")
    assert request_status(controller.address).ranks[0].attached
    rank.processor.stop()
    assert controller.wait(LONG_S) == 0


def test_a_shutdown_request_ends_the_controller_and_frees_its_port(new_controller: StartController) -> None:
    controller = new_controller()
    request_shutdown(controller.address, reason="the launcher has ended")
    assert controller.wait(LONG_S) == 0
    host, port = split_address(controller.address)[0].split(":")
    with socket.socket() as free:
        free.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # closed connections linger; a listener would still refuse
        free.bind((host, int(port)))
        free.listen()
    with pytest.raises(ControllerError, match="did not answer"):
        request_status(controller.address, timeout_s=1.0)


def test_an_orphaned_controller_leaves(new_controller: StartController, new_ranks: StartRanks) -> None:
    controller = new_controller(orphan_timeout_s=0.3, lease_s=0.5)
    for rank in new_ranks(controller.address, 3):
        rank.processor.stop()
    assert controller.wait(LONG_S) == 0


def closing_reasons(rank: Rank) -> list[str]:
    """Collect why the rank's streams end, from now on."""
    reasons: list[str] = []
    reported = rank.processor.stream_closed

    def note(stream: ControlStream, reason: str) -> None:
        reasons.append(reason)
        reported(stream, reason)

    rank.processor.stream_closed = note  # type: ignore[method-assign]
    return reasons


def test_a_rank_does_not_register_with_the_controller_of_another_job(
    new_controller: StartController, tmp_path: Path
) -> None:
    controller = new_controller(job_id="another")
    rank = Rank(0, 3, controller.address, str(tmp_path))
    reasons = closing_reasons(rank)
    until(lambda: any("controller of job 'another', expected 'job'" in reason for reason in reasons), "a refusal")
    rank.processor.stop()
    assert rank.processor.wait_welcomed(0) is None
    assert not request_status(controller.address).ranks[0].attached


def test_a_controller_of_a_lower_term_is_refused(new_controller: StartController, tmp_path: Path) -> None:
    """A rank that has seen term 2 registers with no controller of term 1 any more."""
    new, old = new_controller(world_size=1, term=2), new_controller(world_size=1, term=1)
    addresses = [new.address]
    rank = Rank(0, 1, lambda: addresses[0], str(tmp_path))
    assert rank.processor.wait_welcomed(LONG_S) is not None
    reasons = closing_reasons(rank)
    addresses[0] = old.address
    request_shutdown(new.address, reason="lost")
    assert new.wait(LONG_S) == 0
    until(lambda: any("term 1, but term 2 was seen: it is fenced" in reason for reason in reasons), "a refusal")
    rank.processor.stop()
    assert not request_status(old.address).ranks[0].attached


def test_a_rank_leaves_although_its_training_thread_is_stuck_with_the_logging_lock(
    new_controller: StartController,
) -> None:
    """Neither the verdict nor the exit needs anything that the training thread may hold."""
    controller = new_controller(world_size=1)
    rank = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_process.py")), controller.address, "--alone", "--stuck"]
    )
    try:
        assert rank.wait(LONG_S) == 76
    finally:
        rank.kill()
        rank.wait()


def test_a_writer_that_fails_says_so_and_the_job_goes_another_way(
    new_controller: StartController, new_ranks: StartRanks
) -> None:
    """Rank 0 cannot write: another holder of its shards takes its share."""
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(1)

    def broken_write(order: object) -> object:
        raise OSError("disk on fire")

    ranks[0].holder.write = broken_write  # type: ignore[method-assign, assignment]
    ranks[2].processor.fault(Cause(CauseKind.EXCEPTION, (2,), "ValueError: x"), "")
    for rank in ranks:
        assert rank.exited.wait(LONG_S)
    assert [order.step for rank in ranks for order in rank.holder.published] == [1]


def test_a_torn_file_costs_its_writers_share_and_not_the_directory(
    new_controller: StartController, new_ranks: StartRanks
) -> None:
    """Whoever publishes finds rank 1's file torn: the job's only directory takes the step all the same, without rank 1."""
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(1)

    def publisher(rank: Rank) -> Callable[[PublishOrder], str]:
        def publish(order: PublishOrder) -> str:
            writers = {file.rank for result in order.results for file in result.files}
            if 1 in writers:
                raise TornShare("rank1.distcp, written by rank 1, has 50 bytes, expected 100", (1,))
            rank.holder.published.append(order)
            return f"{order.directory}/iter_{order.step:07d}"

        return publish

    for rank in ranks:
        rank.holder.publish = publisher(rank)  # type: ignore[method-assign, assignment]
    ranks[2].processor.fault(Cause(CauseKind.EXCEPTION, (2,), "ValueError: x"), "")
    for rank in ranks:
        assert rank.exited.wait(LONG_S)
    (order,) = [order for rank in ranks for order in rank.holder.published]
    assert {file.rank for result in order.results for file in result.files} == {0, 2}


def test_a_lost_parent_is_the_ranks_own_fault(new_controller: StartController, tmp_path: Path) -> None:
    """The launcher of a rank is killed: the rank reports it, and the job is saved."""
    controller = new_controller(world_size=1)
    script = str(Path(__file__).with_name("rank_process.py"))
    code = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, {script!r}, {controller.address!r}, '--alone']).pid, flush=True); "
        "sys.stdin.read()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdin is not None
    rank_pid = int(launcher.stdout.readline())
    until(lambda: request_status(controller.address).stage == "running", "assembled")
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    launcher.stdin.close()
    until(lambda: not Path(f"/proc/{rank_pid}").exists() or is_zombie(rank_pid), "the orphan has left")
    assert controller.wait(LONG_S) == 0
    (death,) = [line for line in read_events(tmp_path / "journal0.jsonl") if line.event == "published"]
    assert death.fields


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_no_record_is_needed_where_no_rank_began(new_controller: StartController, new_ranks: StartRanks) -> None:
    """All survivors stand before step 3's update: step 2 is published with step 2's record."""
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(2)
        rank.gate.computing(3)
    ranks[0].processor.preempted()
    for rank in ranks:
        assert rank.exited.wait(LONG_S)
    (order,) = [order for rank in ranks for order in rank.holder.published]
    record: CommitRecord | None = order.record
    assert order.step == 2 and record == commit_record(2)
    assert order.cause.kind is CauseKind.PREEMPTED


def test_heartbeats_carry_the_count_of_finished_steps_and_the_newest_times(
    new_controller: StartController, new_ranks: StartRanks, tmp_path: Path
) -> None:
    """The newest eight of 149 steps, a pause among them. What a rank does in an announced pause is not part of its step."""
    controller = new_controller()
    ranks = new_ranks(controller.address, 3)
    for rank in ranks:
        rank.train_to(144)
    before = [rank.processor.pause(60.0) for rank in ranks]
    ranks[0].exited.wait(2.0)
    for rank, earlier in zip(ranks, before, strict=True):
        rank.processor.end_pause(earlier)
        rank.train_to(149)  # the step of the pause is among the newest 8

    def beats() -> dict[int, list[Heartbeat]]:
        inputs = [event for _, event in read_inputs(inputs_path(tmp_path / "journal0.jsonl")).inputs]
        said = [event.message for event in inputs if isinstance(event, Received)]
        together = [message for event in inputs if isinstance(event, HeartbeatBatch) for message in event.messages]
        all_sent = [message for message in (*said, *together) if isinstance(message, Heartbeat)]
        return {rank: [message for message in all_sent if message.rank == rank] for rank in range(3)}

    until(
        lambda: all(any(beat.steps == 149 for beat in reported) for reported in beats().values()),
        "every rank's last step",
    )
    for reported in beats().values():
        times_s = [seconds for beat in reported for seconds in beat.step_times_s]
        assert 8 <= len(times_s) <= 8 * len(reported) and max(times_s) < 2.0
