"""The health check of a node: what one run of its command means, and which verdict counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from ttp.errors import ConfigError
from ttp.launch.health import check_command, node_health
from ttp.launch.health.check_command import KEPT_BYTES, SHOWN, last_line, run_check, split_check
from ttp.launch.health.node_health import NodeHealth


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def run(code: str, timeout_s: float = 60.0) -> str:
    return run_check(python(code), timeout_s, threading.Event())


def test_a_check_that_succeeds_says_nothing_whatever_it_prints() -> None:
    assert run("print('broken')") == ""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('first'); print('the disk'); raise SystemExit(3)", "failed (exit status 3): the disk"),
        ("import sys; sys.stderr.write('no fsync'); sys.exit(1)", "failed (exit status 1): no fsync"),
        ("raise SystemExit(2)", "failed (exit status 2), and printed nothing"),
        ("import os; os.kill(os.getpid(), 9)", "failed (signal SIGKILL), and printed nothing"),
        ("import os; os.kill(os.getpid(), 40)", "failed (signal 40), and printed nothing"),
        ("import os; os.write(1, b'\\n\\xff\\xfe bad\\x00\\x1b[2J\\r\\n \\n'); os._exit(1)",
         "failed (exit status 1): \ufffd\ufffd bad [2J"),
        ("import os; os.write(1, b'x' * 5000); os._exit(1)", f"failed (exit status 1): {'x' * SHOWN}..."),
    ],
)  # fmt: skip
def test_a_check_that_fails_is_quoted_by_its_last_line(code: str, expected: str) -> None:
    assert run(code) == f"its health check {expected}"


def test_output_without_an_end_is_read_and_not_kept() -> None:
    code = f"import os\nfor _ in range(2000): os.write(1, b'y' * {KEPT_BYTES})\nos.write(1, b'\\nthe end')\nos._exit(1)"
    assert run(code) == "its health check failed (exit status 1): the end"
    flood = "import os\nwhile True: os.write(1, b'z\\n' * 1000)"
    assert run(flood, 3.0) == "its health check took longer than 3 s and was killed; it had printed: z"


def test_a_check_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    """Also one that ignores SIGTERM; its child is in its session."""
    pid = tmp_path / "pid"
    script = f"trap '' TERM; sleep 1000 & echo $! > {pid}; echo waits; wait"
    found = run_check(["sh", "-c", script], 2.0, threading.Event())
    assert found == "its health check took longer than 2 s and was killed; it had printed: waits"
    until(lambda: not _runs(int(pid.read_text())))


def test_a_check_that_leaves_a_process_with_its_output_open_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\nchild = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\nprint('bad', flush=True)\nsys.exit(4)"
    )
    try:
        assert run(code) == "its health check failed (exit status 4): bad"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_program_that_cannot_be_started_is_a_failed_check(tmp_path: Path) -> None:
    found = run_check([str(tmp_path)], 60.0, threading.Event())
    assert found.startswith("its health check failed (exit status 126): ") and found.endswith("ermission denied")


def test_a_program_on_a_file_system_that_hangs_is_a_check_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is never one that executes the program: a stand-in for the kernel, which would hang in exec, hangs instead of it."""
    begun: list[list[str]] = []

    class Hanging(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **more: Any) -> None:
            begun.append(words)
            assert words[0] == "/bin/sh" and words[-2:] == ["/nfs/check", "a b"], "exec would hang in the agent"
            super().__init__(["sleep", "1000"], **more)

    monkeypatch.setattr(subprocess, "Popen", Hanging)
    found = run_check(["/nfs/check", "a b"], 0.3, threading.Event())
    assert found == "its health check took longer than 0.3 s and was killed" and len(begun) == 1


def test_what_has_a_group_of_its_own_is_killed_too(tmp_path: Path) -> None:
    """As with `timeout`, which makes one; also where the check itself has ended."""
    for script, limit_s, expected in (
        ("timeout 1001 sleep 1000 & echo $! > {pid}; wait", 1.0, "took longer than 1 s"),
        ("setsid -w true; timeout 1001 sleep 1000 > /dev/null 2>&1 & echo $! > {pid}; exit 3", 60.0, "exit status 3"),
    ):
        pid = tmp_path / "pid"
        assert expected in run_check(["sh", "-c", script.format(pid=pid)], limit_s, threading.Event())
        child = int(pid.read_text())
        until(lambda child=child: not _runs(child))  # type: ignore[misc]


def test_a_check_is_reaped_only_when_its_session_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its pid may be another process's by then."""
    seen: list[bool] = []

    def sweep(leaders: list[int], spare: object, grace_s: float) -> list[int]:
        seen.extend(Path(f"/proc/{pid}/stat").exists() for pid in leaders)
        return []

    monkeypatch.setattr(check_command, "sweep_sessions", sweep)
    assert run("print('x')") == "" and seen == [True]


def test_one_that_is_stopped_means_nothing() -> None:
    stop = threading.Event()
    stop.set()
    assert run_check(python("import time; time.sleep(1000)"), 500.0, stop) == ""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_last_line_of_nothing_is_empty() -> None:
    assert last_line(b"") == last_line(b"\r\n \n\x00") == ""


@pytest.mark.parametrize(("given", "reason"), [("'a", "No closing quotation"), ("", ""), ("/nosuch/check -v", "")])
def test_a_command_that_is_none_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="invalid --health-check: got") as caught:
        split_check(given)
    assert reason in str(caught.value) and "expected a command" in str(caught.value)


def test_builtin_names_ttp_s_own_checks() -> None:
    assert split_check("builtin --save-dirs 'a b'") == [
        sys.executable, "-m", "ttp.doctor.health_check", "--save-dirs", "a b",
    ]  # fmt: skip
    assert split_check("true -x")[1:] == ["-x"]


def test_a_wrong_option_of_the_builtin_checks_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Else every node would be sick."""
    with pytest.raises(SystemExit) as caught:
        split_check("builtin --save-dir")
    assert caught.value.code == 2
    assert "ttprun --health-check builtin: error: argument --save-dirs" in capsys.readouterr().err


def counted(tmp_path: Path, then: str = "") -> tuple[NodeHealth, Path]:
    """Return a health check that counts its runs in a file, and the file."""
    runs = tmp_path / "runs"
    return NodeHealth(python(f"open({str(runs)!r}, 'a').write('x')\n{then}")), runs


def test_a_verdict_counts_for_the_faults_before_its_check(tmp_path: Path) -> None:
    """One check serves all who ask about the same fault; a later fault has another one."""
    health, runs = counted(tmp_path)
    assert health.verdict() is None, "no check has begun"
    fault = time.monotonic()
    for _ in range(3):
        health.begin(fault)
        assert health.wait(60.0) == ""
    assert runs.read_text() == "x"
    health.begin(time.monotonic())
    assert health.wait(60.0) == ""
    assert runs.read_text() == "xx"


def test_a_fault_during_a_check_has_the_node_checked_again(tmp_path: Path) -> None:
    """What the first one has found may be older than the fault."""
    go = tmp_path / "go"
    health, runs = counted(tmp_path, f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    health.begin(time.monotonic())
    until(runs.exists)
    health.begin(time.monotonic())
    assert health.wait(0.05) is None and health.verdict() is None
    go.touch()
    assert health.wait(60.0) == ""
    assert runs.read_text() == "xx"


def test_a_check_that_cannot_be_run_makes_the_node_sick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the error, in its thread or before: who waits learns of it, and the next check is run."""
    health, runs = counted(tmp_path)

    def broken(*arguments: object) -> str:
        raise MemoryError("no\nmemory")

    with monkeypatch.context() as patch:
        patch.setattr(node_health, "run_check", broken)
        assert health.judge(time.monotonic()) == "its health check cannot be run: no memory"

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert health.judge(time.monotonic()) == "its health check cannot be run: can't start new thread"
    assert health.judge(time.monotonic()) == "" and runs.read_text() == "x"


def test_a_check_that_does_not_end_makes_the_node_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is stopped with the agent."""
    over = threading.Event()

    def hangs(words: object, timeout_s: float, stop: threading.Event) -> str:
        over.wait(60)
        return ""

    monkeypatch.setattr(node_health, "run_check", hangs)
    monkeypatch.setattr(node_health, "SLACK_S", 0.1)
    monkeypatch.setattr(node_health, "STOP_S", 0.1)
    monkeypatch.setattr(node_health, "END_S", 0.0)
    health = NodeHealth(["x"], timeout_s=0.1)
    assert health.judge(time.monotonic()).startswith("its health check does not end: no verdict within 0.3 s")
    health.close()
    assert health.judge(time.monotonic()) == ""
    over.set()


def test_a_check_that_runs_is_stopped_with_the_agent(tmp_path: Path) -> None:
    health, runs = counted(tmp_path, "import time; time.sleep(1000)")
    health.begin(time.monotonic())
    until(lambda: runs.exists() and runs.read_text() == "x")
    began = time.monotonic()
    health.close()
    assert time.monotonic() - began < 30.0
    health.begin(time.monotonic())
    assert runs.read_text() == "x", "none begins from then on"
