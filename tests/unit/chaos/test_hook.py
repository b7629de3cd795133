"""A rank takes orders from the harness's socket and reports its steps to it; without a harness nothing is there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttp.chaos.faults import rank_hook as hooks
from ttp.chaos.faults.control_socket import Control, Message, Peer
from ttp.chaos.faults.inject import AsynchronousFault, InjectedFault, Injection
from ttp.chaos.faults.rank_hook import FaultOrder, Hook, RankFaults, order_line
from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.proto.messages import CommitRecord

FACTS = {"rank": 1, "world_size": 2, "start": 0, "save_dirs": ["/checkpoints"]}
DEADLINE_S = 60.0


def record(step: int) -> CommitRecord:
    return CommitRecord(step, 0.5, 1.0, False, 1.0, (0.1,), (2.25,))


class Optimizer:
    def __init__(self) -> None:
        self.on_point: Any = None
        self.last_record: CommitRecord | None = None


class Holder:
    def __init__(self) -> None:
        self.around: Any = lambda point, step, path: contextlib.nullcontext()


class Harness:
    """The other end, on a thread of its own, which gives each rank these orders when it says hello."""

    def __init__(self, control: Control, *orders: FaultOrder) -> None:
        self.received: list[Message] = []
        self.peer: Peer | None = None
        self._control, self._orders, self._over = control, orders, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            for peer, message in self._control.poll(0.01):
                if message["type"] == "hello":
                    peer.give(self._orders)
                    self.peer = peer
                self.received.append(message)

    def until(self, kind: str) -> Message:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for message in self.received:
                if message["type"] == kind:
                    return message
            time.sleep(0.005)
        raise AssertionError(f"no {kind} in {self.received}")

    def close(self) -> None:
        self._over = True
        self._thread.join()


@contextlib.contextmanager
def hooked(*orders: FaultOrder) -> Iterator[tuple[Harness, Hook]]:
    with Control() as control:
        harness = Harness(control, *orders)
        try:
            hook = Hook(str(control.path), FACTS)
            try:
                yield harness, hook
            finally:
                hook.close()
        finally:
            harness.close()


def test_an_order_of_an_attempt_happens_at_its_point_from_its_step_on_and_is_reported_before() -> None:
    """Other points and earlier steps pass; the harness knows of the injection before it falls."""
    with hooked(FaultOrder(5, Injection("raise", 1, 4, "ready"))) as (harness, hook):
        optimizer = Optimizer()
        on_point = hook.at_steps(optimizer, None)
        on_point("ready", 3)
        on_point("backward", 5)
        with pytest.raises(InjectedFault, match="rank 1, step 6"):
            on_point("ready", 6)
        on_point("ready", 7)
        assert harness.until("hello")["pid"] > 0
        firing = harness.until("firing")
        assert (firing["id"], firing["point"], firing["step"]) == (5, "ready", 6)


def test_every_finished_step_is_reported_with_its_bits() -> None:
    """What the harness compares with a baseline run; a step whose record is not at hand is not reported."""
    with hooked() as (harness, hook):
        optimizer = Optimizer()
        on_point = hook.at_steps(optimizer, None)
        on_point("done", 1)
        optimizer.last_record = record(2)
        on_point("done", 2)
        reported = harness.until("step")
        assert (reported["step"], reported["grad_norm"], reported["sums"]) == (2, (0.5).hex(), [(2.25).hex()])


def test_an_order_may_come_later_and_hits_the_main_thread_from_another() -> None:
    """An asynchronous exception comes over the main thread wherever it is."""
    with hooked() as (harness, _):
        harness.until("hello")
        assert harness.peer is not None
        with pytest.raises(AsynchronousFault):  # it may come before `give` is back
            harness.peer.give([FaultOrder(1, Injection("async", 1, 0, "now"))])
            end = time.monotonic() + DEADLINE_S
            while time.monotonic() < end:
                time.sleep(0.005)


def test_an_order_that_is_cancelled_does_not_happen_and_the_others_do() -> None:
    """By its id, whether it has happened before or not."""
    orders = [FaultOrder(number, Injection("raise", 1, 1, point)) for number, point in ((4, "ready"), (5, "done"))]
    with hooked(*orders) as (harness, hook):
        harness.until("hello")
        assert harness.peer is not None
        harness.peer.give([FaultOrder(6, Injection("raise", 1, 1, "record"))], cancel=[4])
        end = time.monotonic() + DEADLINE_S
        with pytest.raises(InjectedFault, match="at record"):
            while time.monotonic() < end:
                hook.at_point("record", 1)
        hook.at_point("ready", 1)
        with pytest.raises(InjectedFault, match="at done"):
            hook.at_point("done", 1)


def test_a_disk_order_makes_the_next_dump_fail_and_no_other(tmp_path: Path) -> None:
    """Whatever its step; the one after it is written."""
    with hooked(FaultOrder(2, Injection("enospc", 1, 0, "write", times=1))) as (harness, hook):
        around = hook.around(lambda point, step, path: contextlib.nullcontext())
        with around("publish", 8, str(tmp_path)):
            os.mkdir(tmp_path / "published")
        with pytest.raises(OSError, match="No space left"), around("write", 9, str(tmp_path)):
            os.mkdir(tmp_path / "first")
        with around("write", 9, str(tmp_path)):
            os.mkdir(tmp_path / "second")
        assert harness.until("firing")["step"] == 9


def test_an_order_of_a_dump_that_never_comes_to_its_call_is_not_reported(tmp_path: Path) -> None:
    """Whether the disk does it or the rank."""
    kinds = ("slow", "enospc", "slowdisk")
    orders = [FaultOrder(4 + number, Injection(kind, 1, 0, "write", call=1)) for number, kind in enumerate(kinds)]
    torn = FaultOrder(7, Injection("torn", 1, 0, "publish"))
    with hooked(*orders, torn, FaultOrder(3, Injection("raise", 1, 1, "done"))) as (harness, hook):
        around = hook.around(lambda point, step, path: contextlib.nullcontext())
        with around("write", 9, str(tmp_path)):
            os.mkdir(tmp_path / "the only call")
        with pytest.raises(OSError, match="of the job"), around("publish", 9, str(tmp_path)):
            raise OSError("of the job")
        with pytest.raises(InjectedFault):
            hook.at_point("done", 9)
        assert harness.until("firing")["id"] == 3


@pytest.mark.parametrize("kind", ["eio", "slowdisk", "torn"])
def test_a_disks_fault_is_reported_once_at_the_call_that_it_hits(tmp_path: Path, kind: str) -> None:
    """Not when the dump begins; `torn` when it has ended."""
    (tmp_path / "a.distcp").write_bytes(b"1234")
    order = FaultOrder(2, Injection(kind, 1, 0, "write", call=1))
    with hooked(order, FaultOrder(3, Injection("raise", 1, 1, "done"))) as (harness, hook):
        around = hook.around(lambda point, step, path: contextlib.nullcontext())
        with around("write", 9, str(tmp_path)):
            os.mkdir(tmp_path / "first")
            hook.tell("step", step=9)
            for name in ("second", "third"):
                with contextlib.suppress(OSError):
                    os.mkdir(tmp_path / name)
        with pytest.raises(InjectedFault):
            hook.at_point("done", 9)
        end = time.monotonic() + DEADLINE_S
        while not any(message.get("id") == 3 for message in harness.received) and time.monotonic() < end:
            time.sleep(0.005)
        reported = [(message["type"], message.get("id")) for message in harness.received[1:]]
    assert reported == [("step", None), ("firing", 2), ("firing", 3)]
    assert (tmp_path / "third").exists() == (kind != "eio")
    assert (tmp_path / "a.distcp").stat().st_size == (2 if kind == "torn" else 4)


def test_the_folder_of_the_journals_is_reported_when_it_is_known() -> None:
    """It is settled after the hello: a directory that has died is passed over."""
    with Control() as control:
        harness = Harness(control)
        faults = RankFaults(Settings(chaos=str(control.path)), 0, 2, ["/a", "/b"])
        faults.logs_in(Path("/b/ttp_log"))
        assert harness.until("hello")["save_dirs"] == ["/a", "/b"]
        assert harness.until("log_dir")["log_dir"] == "/b/ttp_log"
        faults.close()
        harness.close()


PLACE = "ranks"
"""Of a socket in the current folder: a whole path may have more than the 107 characters that a socket's may."""


@pytest.fixture
def mute_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket whose owner takes connections in and does nothing else, as one that is stopped."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(PLACE)
        listener.listen(1)
        yield listener


def test_orders_that_come_after_the_wait_for_the_first_ones_are_taken(
    mute_harness: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness was stopped when the rank started, and goes on."""
    monkeypatch.setattr(hooks, "FIRST_ORDERS_S", 0.01)
    hook = Hook(PLACE, FACTS)
    connection, _ = mute_harness.accept()
    with connection:
        peer = Peer(connection)
        with pytest.raises(AsynchronousFault):  # it may come before `give` is back
            peer.give([FaultOrder(1, Injection("async", 1, 0, "now"))])
            end = time.monotonic() + DEADLINE_S
            while time.monotonic() < end:
                time.sleep(0.005)
        hook.close()


def test_orders_that_come_together_are_all_taken(mute_harness: socket.socket) -> None:
    """What is read ahead with the first line is not lost."""
    with contextlib.ExitStack() as stack:

        def answer() -> None:
            connection = stack.enter_context(mute_harness.accept()[0])
            orders = [FaultOrder(number, Injection("raise", 1, number, "ready")) for number in (1, 2)]
            lines = [{"cancel": [], "orders": [order_line(order)]} for order in orders]
            connection.sendall("".join(f"{json.dumps(line)}\n" for line in lines).encode())

        harness = threading.Thread(target=answer)
        harness.start()
        hook = Hook(PLACE, FACTS)
        harness.join()
        for step in (1, 2):
            end = time.monotonic() + DEADLINE_S
            with pytest.raises(InjectedFault, match=f"step {step}"):
                while time.monotonic() < end:
                    hook.at_point("ready", step)
        hook.close()


def test_a_harness_that_takes_in_nothing_counts_as_gone(
    mute_harness: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped one never hangs the job: it costs one wait, and what it gives later is not taken."""
    monkeypatch.setattr(hooks, "FIRST_ORDERS_S", 0.01)
    monkeypatch.setattr(hooks, "TELL_S", 0.05)
    hook = Hook(PLACE, FACTS)
    connection, _ = mute_harness.accept()
    with connection:

        def tell_much() -> None:
            for _ in range(4096):
                hook.tell("step", filler="x" * 4096)

        reported = threading.Thread(target=tell_much, daemon=True)
        reported.start()
        reported.join(DEADLINE_S)
        assert not reported.is_alive()
        hook.close()
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.startswith(b'{"type": "hello"') and len(received) < 4096 * 4096


def test_a_harness_that_has_gone_does_not_end_a_rank_whose_trainer_has_sigpipe_at_its_default(tmp_path: Path) -> None:
    """As a trainer does whose output goes to `| head`; in a process of its own, for a default SIGPIPE ends one without a word."""
    program = f"""
import signal, socket, threading
from ttp.chaos.faults.rank_hook import Hook
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with socket.socket(socket.AF_UNIX) as harness:
    harness.bind({str(tmp_path / "harness")!r})
    harness.listen()
    harness.settimeout({DEADLINE_S})
    def answer():
        connection, _ = harness.accept()
        connection.sendall(b'{{"cancel": [], "orders": []}}\\n')
        connection.close()
    answering = threading.Thread(target=answer)
    answering.start()
    hook = Hook({str(tmp_path / "harness")!r}, {FACTS!r})
    answering.join()
for step in range(3):
    hook.tell("step", step=step)
print("trained on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "trained on\n"), done


def test_without_a_harness_there_is_no_hook_at_all() -> None:
    """No thread, no socket, no function that is called at each step."""
    before = set(threading.enumerate())
    faults = RankFaults(Settings(), 0, 2, ["/checkpoints"])
    optimizer, holder = Optimizer(), Holder()
    around = holder.around
    faults.attach(optimizer, holder)
    faults.at_start("start")
    faults.logs_in(Path("/logs"))
    faults.resumed(3, "/checkpoints/iter_0000003", (), record(3))
    faults.close()
    assert optimizer.on_point is None and holder.around is around
    assert set(threading.enumerate()) <= before, "those of earlier tests may have ended"


def test_a_harness_that_is_not_there_is_named() -> None:
    """A variable that remained in the environment."""
    with pytest.raises(ConfigError, match="TTP_CHAOS: got '/nowhere', expected the socket of a running `ttp chaos`"):
        RankFaults(Settings(chaos="/nowhere"), 0, 2, ["/checkpoints"])


def test_a_harness_that_has_gone_does_not_disturb_the_rank() -> None:
    """Training is the job's own; the harness only looks on."""
    with Control() as control:
        harness = Harness(control)
        hook = Hook(str(control.path), FACTS)
        harness.close()
    optimizer = Optimizer()
    on_point = hook.at_steps(optimizer, None)
    for step in range(1, 50):
        optimizer.last_record = record(step)
        on_point("done", step)
    hook.close()
