"""What a fork server leaves out, loses or gets too late never starts a worker twice, and costs speed alone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.high_descriptors import high_socket
from tests.unit.fork_server.conftest import END_S, module, run, serving, until
from ttp.fork_server import client, frames, request, request_loop
from ttp.fork_server.client import ForkServer, Listener, Program
from ttp.fork_server.forked_process import ForkedChild
from ttp.fork_server.forked_program import ForkedProgram
from ttp.fork_server.request import NotForked, fork_at

KILLED = """
import os, signal
own, ended = os.waitpid, []
def waitpid(*arguments):
    ended.append(own(*arguments))
    if len(ended) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return ended[-1]
os.waitpid = waitpid
"""


def test_a_worker_does_not_run_when_its_server_was_killed_before_the_answer(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """The agent executes a worker in its place: it would run twice. The server waits for a trial fork first, then for the one between it and the worker."""
    args = [sys.executable, "-u", script("print('ran')")]
    environ = {**os.environ, **module(tmp_path, "killed", KILLED)}
    read_end, write_end = os.pipe()
    with serving(["killed"], environ=environ) as server, open(read_end) as out:
        server.prepare(args, environ)
        with pytest.raises(NotForked, match="the fork server was lost"):
            server.fork([Program(tuple(args), environ, (0, write_end, write_end))])
        os.close(write_end)
        assert out.read() == ""


def test_a_server_takes_requests_at_the_numbers_that_an_agent_with_many_open_files_gives_it() -> None:
    ours, theirs = map(high_socket, socket.socketpair())
    listener = Listener()
    with ours, theirs, socket.socket(socket.AF_UNIX) as other:
        loop = request_loop.RequestLoop(os.getpid(), theirs, high_socket(listener.socket))
        frames.send(ours, {})
        assert loop._next() is theirs
        frames.receive(theirs)
        other.connect(str(listener.path))
        with loop._next() as channel:
            assert channel is not theirs and channel.family is socket.AF_UNIX
        assert loop._listener is not None
        loop._listener.close()
    listener.close()


@pytest.mark.parametrize("name", ["socketpair", "Popen"])
def test_a_server_that_cannot_be_started_for_want_of_descriptors_is_not_forked_from(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    server, before = ForkServer([]), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(socket if name == "socketpair" else subprocess, name, refuse)
        server.start(os.environ)
    assert server.pid == 0 and len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(NotForked, match=r"the fork server cannot be started: .*Too many open files"):
        server.prepare([sys.executable, "-u", __file__], os.environ)
    server.close()


def test_a_request_that_was_given_up_is_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts again finds it in its socket; whoever asked has executed the program meanwhile."""
    monkeypatch.setattr(request, "ANSWER_S", 0.01)
    listener, argv = Listener(), [sys.executable, "-P", "-m", "this"]
    read_end, write_end = os.pipe()
    with pytest.raises(NotForked, match="timed out"):
        fork_at(str(listener.path), argv, os.environ, (0, write_end, write_end))
    os.close(write_end)
    monkeypatch.setattr(request, "ANSWER_S", END_S)
    with serving(["json"], listener) as server, open(read_end) as out, open(os.devnull, "wb") as null:
        assert fork_at(server.address, argv, os.environ, (0, null.fileno(), 2)).wait(END_S) == 0
        assert out.read() == ""


def test_the_order_of_the_path_is_that_of_an_executed_program(script: Callable[[str], str], tmp_path: Path) -> None:
    """Also where PYTHONPATH names the folder of ttp."""
    name = script("import json, sys; print(json.dumps(sys.path))")
    root = str(Path(request.__file__).parents[2])
    path = {"PYTHONPATH": os.pathsep.join([root, str(tmp_path / "lib")])}
    executed = subprocess.run([sys.executable, "-u", name], capture_output=True, env={**os.environ, **path})
    with serving(["json"], environ=path) as server:
        assert json.loads(run(server, name, folder=tmp_path, environ=path)[1]) == json.loads(executed.stdout)


def test_a_variable_that_only_new_interpreters_read_is_not_called_late(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """In an executed worker it has no effect either: scripts set it for their children. Nor one that had this value before."""
    name = script("import os; os.environ.update(PYTHONHASHSEED='3', LD_LIBRARY_PATH='/x', OMP_NUM_THREADS='1')")
    environ = {"OMP_NUM_THREADS": "1"}
    with serving(environ=environ) as server:
        assert run(server, name, folder=tmp_path, environ=environ)[2] == ""


def test_an_exception_is_the_status_of_a_process_that_is_nobodys_child(tmp_path: Path) -> None:
    path = module(tmp_path, "raises", "raise ValueError(3)")
    with serving(["json"], Listener(), path) as server, open(tmp_path / "out", "wb") as out:
        argv = [sys.executable, "-P", "-m", "raises"]
        assert fork_at(server.address, argv, os.environ, (0, out.fileno(), out.fileno())).wait(END_S) == 0
    assert (tmp_path / "out").read_text().splitlines()[-1] == "ended with exit status 1"


def test_a_server_that_took_no_request_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(frames, "send", lambda *_: (_ for _ in ()).throw(BrokenPipeError()))
        server = ForkServer(["json"])
        server.start(os.environ)
    os.kill(server.pid, signal.SIGSTOP)  # it has not ended yet as it is asked for
    assert server._channel is not None
    server._channel.shutdown(2)
    try:
        with pytest.raises(NotForked, match="the fork server was lost"):
            server.prepare([sys.executable, "-u", __file__], os.environ)
    finally:
        server.close()


def test_modules_that_are_named_while_there_is_no_server_are_imported_by_the_next(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    name = script("import sys; print('wave' in sys.modules)")
    server = ForkServer(["json"])
    server.also_import(["wave"])
    try:
        assert run(server, name, folder=tmp_path)[1] == "True\n"
    finally:
        server.close()


def test_a_folder_that_is_gone_has_the_workers_executed(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [sys.executable, "-u", str(tmp_path / script(""))]
    (tmp_path / "gone").mkdir()
    with serving() as server:
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        for program in (args, [*args[:2], "-m", "this"]):
            with pytest.raises(NotForked, match="No such file or directory"):
                server.prepare(program, os.environ)


def test_a_server_shows_its_own_arguments_only() -> None:
    with serving() as server:
        server._await_imports()
        assert "request_loop.py" in (shown := Path(f"/proc/{server.pid}/cmdline").read_text()) and "--" not in shown


def test_a_module_that_was_asked_for_and_cannot_be_imported_is_named(
    script: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the default list may not be installed: no warning is needed."""
    with serving(["no_default"]) as server:
        server.also_import(["no_such_module"])
        assert run(server, script(""), folder=tmp_path)[0] == 0
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
        "the fork server cannot import no_such_module (ModuleNotFoundError: No module named 'no_such_module')"
    ]


LIMITED = """
import errno, os
own, forks = os.fork, []
def fork():
    forks.append(1)
    if len(forks) == 4:
        raise OSError(errno.EAGAIN, "")
    return own()
os.fork = fork
"""


def children() -> str:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


def test_of_an_attempt_that_is_not_forked_whole_nothing_runs(script: Callable[[str], str], tmp_path: Path) -> None:
    """A trial, the one between, one worker, and the second worker cannot be forked. The first has no time to run, and is reaped."""
    args = [sys.executable, "-u", script("print('ran')")]
    environ = {**os.environ, **module(tmp_path, "limited", LIMITED)}
    read_end, write_end = os.pipe()
    with serving(["limited"], environ=environ) as server, open(read_end) as out:
        server.prepare(args, environ)
        before = children()
        with pytest.raises(NotForked, match="fork: Resource temporarily unavailable"):
            server.fork([Program(tuple(args), environ, (0, write_end, write_end))] * 2)
        os.close(write_end)
        assert out.read() == ""
        assert children() == before


def test_a_worker_whose_agent_is_gone_does_not_run() -> None:
    """Another process has adopted it, which would not end it."""
    held, release = os.pipe()
    os.write(release, b"1")
    if (pid := os.fork()) == 0:
        request_ = {"adopted": True, "folder": "/", "argv": [], "environ": {}}
        ForkedProgram.become(request_, [], [], held, os.getpid())
        os._exit(0)
    os.close(held)
    os.close(release)
    assert ForkedChild(pid, []).wait(END_S) == 1


def test_orphans_are_adopted_during_a_fork_only(script: Callable[[str], str], tmp_path: Path) -> None:
    with serving() as server:
        assert run(server, script(""), folder=tmp_path)[0] == 0
    adopts = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    assert adopts.value == 0


def test_a_listener_leaves_no_directory() -> None:
    """Its server may have been killed."""
    listener = Listener()
    listener.close()
    assert not listener.path.parent.exists()


@pytest.mark.parametrize("backend", ["cuda", "musa", "a_plug_ins_own"])
def test_an_accelerator_that_was_initialized_is_not_forked_with(
    script: Callable[[str], str], tmp_path: Path, backend: str
) -> None:
    """Each back end in torch's namespace is asked, whatever its name; one that was not initialized, and a module that is another thing, changes nothing."""
    lines = ("from types import ModuleType", "import json", f"{backend}, other = ModuleType({backend!r}), ModuleType('other')",
             f"{backend}._is_in_bad_fork, other._is_in_bad_fork = lambda: True, lambda: False")  # fmt: skip
    path = module(tmp_path, "torch", "\n".join(lines))
    with (
        serving(["torch"], environ=path) as server,
        pytest.raises(NotForked, match="an imported module initialized the accelerator"),
    ):
        run(server, script(""), folder=tmp_path, environ=path)


def test_a_device_that_is_open_is_not_forked_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_loop, "DEVICE_FILES", (str(tmp_path),))
    with open(tmp_path / "device", "wb"):
        assert request_loop.unusable() == f"an imported module opened {tmp_path / 'device'}"


def test_a_command_that_cannot_be_forked_does_not_keep_the_next_from_it(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    with serving() as server:
        with pytest.raises(NotForked, match="option -c is for a new interpreter"):
            server.prepare([sys.executable, "-u", "-c", ""], os.environ)
        assert run(server, script(""), folder=tmp_path)[0] == 0


def test_no_rank_waits_for_a_server_that_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks keep its address: the socket is gone, and they execute their controllers at once."""
    monkeypatch.setattr(request, "ANSWER_S", END_S)
    path = module(tmp_path, "deadly", "import os; os._exit(7)")
    with serving(["deadly"], Listener(), path) as server:
        address = server.address

        def given_up() -> bool:
            server.look()
            return server.pid == 0

        until(given_up)
        with pytest.raises(NotForked, match="No such file or directory"):
            fork_at(address, [sys.executable, "-P", "-m", "this"], os.environ, (0, 1, 2))


def test_one_more_worker_is_forked_from_any_thread(script: Callable[[str], str], tmp_path: Path) -> None:
    """As those before, and not when a module has changed on disk since: the others have it as it was."""
    environ = {**os.environ, **module(tmp_path, "wave", "word = 'before'")}
    program = Program((sys.executable, "-u", script("import sys, wave; sys.exit(len(wave.word))")), environ)
    with serving(["wave"], environ=environ) as server:
        server.prepare(program.argv, environ)
        children: list[ForkedChild] = []
        thread = threading.Thread(target=lambda: children.append(server.fork_one(program)))
        thread.start()
        thread.join(END_S)
        assert children[0].wait(END_S) == len("before")
        module(tmp_path, "wave", "word = 'after, which is longer'")
        with pytest.raises(NotForked, match=r"wave\.py has changed since the workers were started"):
            server.fork_one(program)


@pytest.mark.parametrize("why", ["busy", "imports", "none", "variables", "ended", "unusable"])
def test_one_more_worker_is_refused_where_it_would_take_a_while(
    why: str, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server is started for it: that would end with the thread that asks. The server serves on, where there is one."""
    monkeypatch.setattr(client, "ONE_S", 0.05)
    program = Program((sys.executable, "-u", script("")), os.environ)
    variables = {**os.environ, **module(tmp_path, "slow", f"open({str(tmp_path / 'pipe')!r}).read()"), "HELD": "1"}
    module(
        tmp_path,
        "thread",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    )
    os.mkfifo(tmp_path / "pipe")
    program = Program(program.argv, variables)
    with serving(["json"], environ=variables) as server:
        server.prepare(program.argv, variables)
        pid, busy = server.pid, contextlib.ExitStack()
        match why:
            case "busy":
                busy.enter_context(held(server))
            case "imports":
                server.also_import(["slow"])
            case "none":
                server.close()
            case "variables":
                program = Program(program.argv, {**variables, "OMP_NUM_THREADS": "7"})
            case "ended":
                os.kill(pid, signal.SIGKILL)
            case "unusable":
                server.also_import(["thread"])
                monkeypatch.setattr(client, "ONE_S", END_S)
        expected = {
            "busy": "the fork server is busy", "imports": "still imports", "none": "there is no fork server",
            "variables": "other variables", "ended": "was lost", "unusable": "started 1 threads",
        }  # fmt: skip
        with pytest.raises(NotForked, match=expected[why]):
            server.fork_one(program)
        busy.close()
        if why == "imports":
            (tmp_path / "pipe").write_text("")
        if why in ("busy", "imports", "variables"):
            monkeypatch.setattr(client, "ONE_S", END_S)
            assert server.fork_one(Program(program.argv, variables)).wait(END_S) == 0 and server.pid == pid


@contextlib.contextmanager
def held(server: ForkServer) -> Iterator[None]:
    """Have another thread use the server meanwhile."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with server._lock:
            begun.set()
            over.wait(END_S)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert begun.wait(END_S)
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)


def test_the_look_for_a_lost_server_does_not_wait_for_a_fork(script: Callable[[str], str]) -> None:
    """The agent's main thread looks every tick."""
    with serving(["json"]) as server:
        looking = threading.Thread(target=server.look, daemon=True)
        with held(server):
            looking.start()
            looking.join(END_S / 4)
            assert not looking.is_alive()
