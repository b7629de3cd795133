"""Workers that are forked are what a new interpreter would have been, and whatever goes wrong with a server costs speed alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fork_server.conftest import END_S, module, run, serving, state_of, until
from ttp.fork_server import frames, request
from ttp.fork_server.client import MOST_DEATHS, ForkServer, Listener, Program, not_forkable
from ttp.fork_server.forked_process import ForkedChild, ForkedOrphan
from ttp.fork_server.request import NotForked, fork_at

FACTS = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "file": __file__, "main file": main.__file__,
    "spec": getattr(__spec__, "name", None), "package": __package__, "path": sys.path, "folder": os.getcwd(),
    "environ": dict(os.environ), "leads a session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "loader": type(__loader__).__name__, "annotations": __annotations__, "doc": __doc__, "unbuffered": sys.stdout.write_through,
    "shown": open("/proc/self/cmdline").read().split("\\0")[:len(sys.orig_argv)],
    "shown environ": sorted(v for v in open("/proc/self/environ", errors="replace").read().split("\\0") if v.startswith(("TTP_", "RANK="))),
    "signals": [str(signal_of) for signal_of in map(__import__("signal").getsignal, range(1, 32))],
    "descriptors": sorted(os.listdir("/proc/self/fd")), "first builtin": __builtins__.__name__,
    "safe path": sys.flags.safe_path, "parent": os.getppid(),
}), flush=True)
print("to stderr", file=sys.stderr)
print(sys.stdin.read())
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_forked_program_sees_what_an_executed_one_sees(
    script: Callable[[str], str], tmp_path: Path, as_module: bool
) -> None:
    """Every fact that a program can ask for at its beginning, from `__file__` to open descriptors, is the same."""
    name = script(FACTS)
    program = ["-m", "script", "a", "--b=c d"] if as_module else [name, "a", "--b=c d"]
    variables = {**os.environ, "RANK": "3", "TTP_START_ID": "x", "ODD": "\udcff="}
    executed = subprocess.run(
        [sys.executable, "-u", *program],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
    )
    assert executed.returncode == 0, executed.stderr.decode()
    with serving() as server, open(os.devnull, "rb") as null:
        before = os.dup(0)
        os.dup2(null.fileno(), 0)
        try:
            status, out, err = run(server, *program, folder=tmp_path, environ=variables)
        finally:
            os.dup2(before, 0)
            os.close(before)
    assert (status, err) == (0, executed.stderr.decode()), err
    assert json.loads(out.splitlines()[0]) == json.loads(executed.stdout.splitlines()[0])


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(75)", 75),
        ("import sys; sys.exit('no')", 1),
        ("raise ValueError(3)", 1),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
        ("def f(:", 1),
        ("import atexit; atexit.register(print, 'at exit')", 0),
        ("import atexit, sys; atexit.register(lambda: print(repr(sys.last_value))); raise ValueError(3)", 1),
        ("import threading, time; threading.Timer(0.1, print, ['thread']).start()", 0),
        ("__import__('pickle').dumps(type('A', (), {'__module__': '__main__'}))", 1),
    ],
)
def test_a_forked_program_ends_as_an_executed_one(
    script: Callable[[str], str], tmp_path: Path, text: str, status: int
) -> None:
    """Same status, same output, same traceback."""
    name = script(text)
    executed = subprocess.run([sys.executable, "-u", name], capture_output=True)
    with serving() as server:
        forked = run(server, name, folder=tmp_path)
    assert executed.returncode == status
    assert forked[:2] == (status, executed.stdout.decode())
    if status != -signal.SIGINT:  # which has the fork's own frames before the script's
        assert forked[2] == executed.stderr.decode()


def test_workers_that_are_forked_together_have_their_own_descriptors_only(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """Else a reader of one's output waits for the end of all."""
    args = (sys.executable, "-u", script("import os; print(sorted(os.listdir('/proc/self/fd'))); os.write(2, b'err')"))
    with (
        serving(listener=Listener()) as server,
        contextlib.ExitStack() as stack,
    ):
        files = [
            [stack.enter_context(open(tmp_path / f"{n}{name}", "wb")) for name in ("out", "err")] for n in range(2)
        ]
        server.prepare(args, os.environ)
        programs = [Program(args, os.environ, (0, out.fileno(), err.fileno())) for out, err in files]
        assert [child.wait(END_S) for child in server.fork(programs)] == [0, 0]
    assert [(tmp_path / f"{n}out").read_text() for n in range(2)] == ["['0', '1', '2', '3']\n"] * 2
    assert [(tmp_path / f"{n}err").read_text() for n in range(2)] == ["err"] * 2


def test_a_worker_without_an_open_stderr_has_none(script: Callable[[str], str]) -> None:
    args = (
        sys.executable,
        "-u",
        script("import os; os.write(2, b'lost'); print(os.readlink('/proc/self/fd/2') != '/dev/null')"),
    )
    with serving() as server:
        server.prepare(args, os.environ)
        with open(os.devnull, "wb") as null:
            closed = os.dup(0)
            os.close(closed)
            [child] = server.fork([Program(args, os.environ, (0, null.fileno(), closed))])
        assert child.wait(END_S) == 0


def test_many_workers_are_forked_in_several_requests(script: Callable[[str], str]) -> None:
    """The kernel passes at most 253 descriptors with one."""
    args = (sys.executable, "-u", script(""))
    with serving() as server:
        server.prepare(args, os.environ)
        assert [child.wait(END_S) for child in server.fork([Program(args, os.environ)] * 85)] == [0] * 85


def test_a_worker_begins_in_the_folder_of_its_agent(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that is another one than when the server was started. The imports are not collected as garbage."""
    name = tmp_path / script("import gc, os; print(os.getcwd(), gc.get_freeze_count() > 0)")
    (tmp_path / "other").mkdir()
    with serving() as server:
        monkeypatch.chdir(tmp_path / "other")
        assert run(server, str(name), folder=tmp_path)[1] == f"{tmp_path / 'other'} True\n"


def test_variables_of_ttp_are_shown_where_not_all_fit(script: Callable[[str], str], tmp_path: Path) -> None:
    """The agent finds the processes of an attempt by one."""
    name = script("print('TTP_START_ID=this' in open('/proc/self/environ').read().split('\\0'))")
    environ = {"A": "x" * 100_000, "TTP_START_ID": "this"}
    with serving() as server:
        assert run(server, name, folder=tmp_path, environ=environ)[1] == "True\n"


def test_the_exception_that_ends_a_worker_is_recorded(script: Callable[[str], str], tmp_path: Path) -> None:
    environ = {"TTP_LAUNCHED": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    with serving(["ttp.exchange.error_file"]) as server:
        assert run(server, script("raise ValueError(3)"), folder=tmp_path, environ=environ)[0] == 1
    assert "ValueError" in (tmp_path / "error.json").read_text()


def test_imports_do_not_see_the_variables_of_a_worker(script: Callable[[str], str], tmp_path: Path) -> None:
    """The agent may be a worker of another job."""
    name = script("import mine; print(mine.VALUE)")
    path = {**module(tmp_path, "mine", "import os; VALUE = os.environ.get('RANK')"), "RANK": "5"}
    with serving(["mine"], environ=path) as server:
        assert run(server, name, folder=tmp_path, environ=path)[1] == "None\n"


def test_a_script_that_cannot_be_read(script: Callable[[str], str], tmp_path: Path) -> None:
    name = script("")
    args = [sys.executable, "-u", name]
    with serving() as server:
        server.prepare(args, os.environ)
        os.remove(name)
        assert run_prepared(server, args) == 2


def run_prepared(server: ForkServer, args: list[str]) -> int:
    [child] = server.fork([Program(tuple(args), os.environ)])
    return child.wait(END_S)


def test_generators_of_random_numbers_differ_from_worker_to_worker(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    name = script("import random, numpy; print(random.random(), numpy.random.random())")
    with serving(["numpy.random", "random"], environ={"OPENBLAS_NUM_THREADS": "1"}) as server:
        environ = {"OPENBLAS_NUM_THREADS": "1"}
        first, second = (run(server, name, folder=tmp_path, environ=environ)[1].split() for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1]


def test_threads_of_a_library_that_ends_them_before_a_fork_do_no_harm(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """OpenBLAS has threads of its own as soon as numpy is loaded."""
    name = script("import numpy; print(numpy.ones((300, 300)).dot(numpy.ones((300, 300))).sum())")
    with serving(["numpy"], environ={"OPENBLAS_NUM_THREADS": "4"}) as server:
        assert run(server, name, folder=tmp_path, environ={"OPENBLAS_NUM_THREADS": "4"})[1] == "27000000.0\n"


THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


def test_a_module_that_starts_a_thread_is_not_forked_with(script: Callable[[str], str], tmp_path: Path) -> None:
    """Of the default list: nothing is forked, and the reason is given. One that was added: another server does without it."""
    name, path = script("import sys; print('threaded' in sys.modules)"), module(tmp_path, "threaded", THREAD)
    with (
        serving(["threaded"], environ=path) as server,
        pytest.raises(NotForked, match="an imported module started 1 threads"),
    ):
        run(server, name, folder=tmp_path, environ=path)
    with serving(["json"], environ=path) as server:
        server.also_import(["threaded"])
        assert run(server, name, folder=tmp_path, environ=path)[:2] == (0, "False\n")


@pytest.mark.parametrize("said", [None, "background_thread:false,narenas:1"])
def test_pyarrow_is_forked_with(script: Callable[[str], str], tmp_path: Path, said: str | None) -> None:
    """Its jemalloc starts a thread as it is loaded; the variable that has it start none is not left to the workers."""
    name = script("import sys, os; print('pyarrow' in sys.modules, os.environ.get('JE_ARROW_MALLOC_CONF'))")
    environ = {"JE_ARROW_MALLOC_CONF": said} if said else {}
    with serving(["pyarrow"], environ=environ) as server:
        assert run(server, name, folder=tmp_path, environ=environ)[:2] == (0, f"True {said}\n")


def test_what_the_user_has_said_of_pyarrow_stays(script: Callable[[str], str], tmp_path: Path) -> None:
    name, environ = script(""), {"JE_ARROW_MALLOC_CONF": "background_thread:true"}
    with serving(["pyarrow"], environ=environ) as server, pytest.raises(NotForked, match="started 1 threads"):
        run(server, name, folder=tmp_path, environ=environ)


def test_a_module_that_was_changed_is_imported_anew(script: Callable[[str], str], tmp_path: Path) -> None:
    name = script("import sys; print(sys.modules['mine'].VALUE)")
    path = module(tmp_path, "mine", "VALUE = 1")
    with serving(["mine"], environ=path) as server:
        assert run(server, name, folder=tmp_path, environ=path)[1] == "1\n"
        module(tmp_path, "mine", "VALUE = 'two'")
        assert run(server, name, folder=tmp_path, environ=path)[1] == "two\n"


def test_a_module_beside_the_script_hides_one_that_was_preloaded(script: Callable[[str], str], tmp_path: Path) -> None:
    """An executed worker would import the script's own."""
    name, path = script("import mine"), module(tmp_path, "mine", "")
    with serving(["mine"], environ=path) as server:
        assert run(server, name, folder=tmp_path, environ=path)[0] == 0
        (tmp_path / "mine.py").touch()
        with pytest.raises(NotForked, match=r"mine.py hides a module"):
            run(server, name, folder=tmp_path, environ=path)


def test_a_module_that_cannot_be_imported_is_the_workers_own_affair(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    name = script("import no_such_module")
    with serving(["no_such_module", "json"]) as server:
        status, _, err = run(server, name, folder=tmp_path)
    assert status == 1 and "ModuleNotFoundError: No module named 'no_such_module'" in err


def test_workers_with_another_variable_of_a_library_get_another_server(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """A library has read it when the modules were imported."""
    name, path = (
        script("import mine; print(mine.VALUE)"),
        module(tmp_path, "mine", "import os; VALUE = os.environ['OMP_NUM_THREADS']"),
    )
    with serving(["mine"], environ={"OMP_NUM_THREADS": "1", **path}) as server:
        first = server.pid
        assert run(server, name, folder=tmp_path, environ={"OMP_NUM_THREADS": "1", **path})[1] == "1\n"
        assert server.pid == first
        assert run(server, name, folder=tmp_path, environ={"OMP_NUM_THREADS": "7", "RANK": "0", **path})[1] == "7\n"
        assert server.pid != first


def test_a_variable_that_comes_too_late_is_named(script: Callable[[str], str], tmp_path: Path) -> None:
    name = script("import os; os.environ['OMP_NUM_THREADS'] = '3'; os.environ['MINE'] = '1'")
    with serving() as server:
        _, _, err = run(server, name, folder=tmp_path, environ={})
    assert "OMP_NUM_THREADS=3 was set after" in err and "MINE" not in err


@pytest.mark.parametrize("imported", [False, True])
def test_a_variable_of_torchs_compiler_is_late_once_that_is_imported(
    script: Callable[[str], str], tmp_path: Path, imported: bool
) -> None:
    """On a node with an accelerator it is not imported ahead, and the script's own import reads the variable."""
    name = script("import os; os.environ['TORCH_COMPILE_DISABLE'] = '1'")
    with serving(["torch._dynamo"] if imported else ["torch"]) as server:
        _, _, err = run(server, name, folder=tmp_path, environ={})
    assert ("TORCH_COMPILE_DISABLE=1 was set after" in err) is imported, err


def test_variables_that_are_put_back_cause_no_warning(script: Callable[[str], str], tmp_path: Path) -> None:
    """As accelerate does around its own: all are cleared, and set again."""
    name = script("import os; was = os.environ.copy(); os.environ.clear(); os.environ.update(was)")
    environ = {"OMP_NUM_THREADS": "1"}
    with serving(environ=environ) as server:
        assert run(server, name, folder=tmp_path, environ=environ)[2] == ""


def test_a_server_that_died_is_started_again(script: Callable[[str], str], tmp_path: Path) -> None:
    """Any number of times, as long as workers are forked in between."""
    name = script("")
    with serving() as server:
        for _ in range(MOST_DEATHS + 1):
            first = server.pid
            os.kill(first, signal.SIGKILL)

            def replaced(first: int = first) -> bool:
                server.look()
                return server.pid != first

            until(replaced)
            assert run(server, name, folder=tmp_path)[0] == 0


def test_a_server_that_dies_again_and_again_is_given_up(script: Callable[[str], str], tmp_path: Path) -> None:
    """Each attempt executes its workers then, and the last of the servers is not followed by another one."""
    name, path = script(""), module(tmp_path, "deadly", "import os; os._exit(7)")
    with serving(["deadly"], environ=path) as server:
        for _ in range(MOST_DEATHS):
            with pytest.raises(NotForked):
                run(server, name, folder=tmp_path, environ=path)
        with pytest.raises(NotForked, match=f"{MOST_DEATHS} fork servers in a row"):
            run(server, name, folder=tmp_path, environ=path)
        assert server.pid == 0


AGENT = """
import os, sys, time
from ttp.fork_server.client import ForkServer, Listener
listener = Listener() if sys.argv[1] == "listens" else None
server = ForkServer([sys.argv[2]], listener)
server.start(dict(os.environ))
print(server.pid, server.address or "-", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("moment", ["starting", "importing", "waiting"])
@pytest.mark.parametrize("listens", ["listens", "alone"])
def test_nothing_of_a_server_is_left_when_its_agent_is_killed(tmp_path: Path, moment: str, listens: str) -> None:
    """Neither its process nor, once its imports are done, the directory of its socket."""
    text = f"import time; open('begun', 'w'); time.sleep({2 if listens == 'listens' else 600})"
    path, imports = module(tmp_path, "sleeping", text), "json" if moment == "waiting" else "sleeping"
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, listens, imports],
        stdout=subprocess.PIPE,
        env={**os.environ, **path},
        cwd=tmp_path,
    ) as agent:
        assert agent.stdout is not None
        pid, address = agent.stdout.readline().decode().split()
        if moment == "importing":
            until((tmp_path / "begun").exists)
        agent.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or state_of(int(pid)) == "Z")
    assert address == "-" or not Path(address).parent.exists()


def test_another_process_has_one_forked_that_is_nobodys_child(tmp_path: Path) -> None:
    """Its end is seen and it takes signals; an exit status other than 0 is the last that it writes."""
    with serving(["json.tool"], Listener()) as server, open(tmp_path / "out", "wb") as out:
        argv = [sys.executable, "-P", "-m", "json.tool", "--no-such-option"]
        process = fork_at(server.address, argv, os.environ, (0, out.fileno(), out.fileno()))
        assert process.wait(END_S) == 0 and process.poll() == 0
        assert (tmp_path / "out").read_text().splitlines()[-1] == "ended with exit status 2"
        assert "RuntimeWarning" not in (tmp_path / "out").read_text(), "the program had been preloaded"
        sleeping = fork_at(
            server.address, [*argv[:3], "timeit", "-n1", "-r1", "import time; time.sleep(600)"], os.environ, (0, 1, 2)
        )
        with pytest.raises(subprocess.TimeoutExpired):
            sleeping.wait(0.0)
        sleeping.terminate()
        assert sleeping.wait(END_S) == 0
        path = server.address
    with pytest.raises(NotForked):
        fork_at(path, argv, os.environ, (0, 1, 2))


def test_a_stranger_who_says_nothing_does_not_stop_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "ANSWER_S", END_S)
    with serving(["json"], Listener()) as server, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(server.address)
        argv = [sys.executable, "-P", "-m", "this"]
        with open(os.devnull, "wb") as null:
            assert fork_at(server.address, argv, os.environ, (0, null.fileno(), 2)).wait(END_S) == 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (["-m", "x"], ""),
        (["-m"], "no module"),
        ([], "is not this Python"),
        (["-"], "option - is for a new"),
        (["-c", "x"], "option -c is for a new"),
        (["no_such_file.py"], "is not a Python file"),
        (["."], "is not a Python file"),
        ([__file__], ""),
    ],
)
def test_what_is_executed_as_ever(program: list[str], reason: str) -> None:
    assert reason in not_forkable([sys.executable, "-u", *program]) and bool(reason) == bool(
        not_forkable([sys.executable, "-u", *program])
    )


def test_an_archive_is_executed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "archive.py", "w") as archive:
        archive.writestr("__main__.py", "")
    assert "is not a Python file" in not_forkable([sys.executable, "-u", str(tmp_path / "archive.py")])


def test_another_interpreter_is_executed() -> None:
    assert "is not this Python interpreter" in not_forkable(["/bin/sh", "-u", __file__])


def test_a_child_that_was_reaped_by_somebody_else_counts_as_popen_counts_it() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert ForkedChild(pid, []).poll() == 0


def test_a_child_that_has_ended_gets_no_signal() -> None:
    """Its number may be another process's by now."""
    ForkedChild(1 << 30, [], 0).send_signal(signal.SIGKILL)


def test_no_descriptor_of_a_process_is_left() -> None:
    before = belongings(os.getpid())
    ForkedOrphan(os.getpid(), [])
    assert belongings(os.getpid()) == before


def belongings(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.long
def test_200_attempts_leave_nothing_in_server_or_agent(script: Callable[[str], str]) -> None:
    """No descriptor, no thread, no process, and no memory that grows with the attempts."""
    args = [sys.executable, "-u", script("")]
    program = Program(tuple(args), os.environ)
    grown = []
    with serving() as server:
        for number in range(200):
            server.prepare(args, os.environ)
            assert [child.wait(END_S) for child in server.fork([program] * 4)] == [0] * 4
            if number in (9, 199):
                resident = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
                grown.append((belongings(os.getpid()), belongings(server.pid), resident))
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
    assert grown[0][:2] == grown[1][:2] and not children.split()
    assert grown[1][2] - grown[0][2] < 256, "pages: 1 MB"


def test_a_message_whose_descriptors_found_no_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops them then, and says so in a flag alone."""
    ours, theirs = socket.socketpair()
    received = socket.recv_fds

    def full(*args: Any) -> Any:
        body, descriptors, flags, address = received(*args)
        for descriptor in descriptors:
            os.close(descriptor)
        return body, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(socket, "recv_fds", full)
    with ours, theirs:
        frames.send(ours, {}, [0])
        with pytest.raises(OSError, match="no room for the descriptors"):
            frames.receive(theirs)
