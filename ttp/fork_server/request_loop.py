"""The fork server's program: imports modules once, then forks a process for each request.

Run by path, with the descriptors of its sockets. Owns one thread and no device. A worker is forked twice, so that the agent, which adopts
orphans meanwhile, becomes its parent: it waits for the worker, signals it and reads its status as if it had started it itself. Ends when
the agent does.
"""

from __future__ import annotations

import sys

AT_START = frozenset(sys.modules)
"""What every interpreter has loaded before its program."""
if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this folder: a script's own comes in its place

import contextlib  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEVICE_FILES = (
    "/dev/nvidia",
    "/dev/davinci",
    "/dev/kfd",
    "/dev/mtgpu",
    "/dev/cambricon",
    "/dev/dri",
    "/dev/infiniband",
)
BAD_FORK = 3
REQUEST_S = 2.0
"""How long one who has connected may take to send its request."""


@contextlib.contextmanager
def ttp_importable() -> Iterator[None]:
    """Find this very ttp, wherever it is, without a lasting change of the path that workers inherit."""
    if ROOT in sys.path:
        yield
        return
    sys.path.append(ROOT)
    try:
        yield
    finally:
        sys.path.remove(ROOT)


with ttp_importable():
    from ttp.fork_server import frames
    from ttp.fork_server.forked_program import ForkedProgram
    from ttp.fork_server.linux import end_with_parent, show_as


class RequestLoop:
    """Answers requests, one after another."""

    def __init__(self, agent: int, channel: socket.socket, listener: socket.socket | None) -> None:
        """`agent`: its process. `channel`: to it. `listener`: where others connect, each for one fork."""
        self._channel = channel
        self._listener = listener
        self._agent = agent
        self._stamps: dict[str, tuple[int, int]] = {}
        """Size and time of each file that was loaded."""

    def serve(self) -> ForkedProgram:
        """Answer until the agent is gone. Returns in a process that was forked, and only there."""
        while True:
            channel = self._next()
            try:
                request, descriptors = frames.receive(channel)
            except (EOFError, OSError):
                if channel is self._channel:
                    self._end()
                channel.close()
                continue
            with contextlib.suppress(OSError):  # it is gone: of the agent the next look finds that
                if request["kind"] == "preload":
                    frames.send(channel, self._preload(request["modules"]))
                elif request["kind"] == "check":
                    changed = [path for path, stamp in self._stamps.items() if _stamp(path) != stamp]
                    frames.send(channel, {"changed": changed})
                elif (worker := self._fork(channel, request, descriptors)) is not None:
                    return worker
            if channel is not self._channel:
                channel.close()

    def _next(self) -> socket.socket:
        """Return a channel with a request."""
        if self._listener is None:
            return self._channel
        poll = select.poll()  # a descriptor keeps the agent's number, which may be 1,024 or more
        for each in (self._channel, self._listener):
            poll.register(each, select.POLLIN)
        if self._channel.fileno() in dict(poll.poll()):
            return self._channel
        channel, _ = self._listener.accept()
        channel.settimeout(REQUEST_S)
        return channel

    def _end(self) -> NoReturn:
        """The agent is gone; a socket's directory goes, too, if it had no time for that."""
        if self._listener is not None:
            shutil.rmtree(os.path.dirname(self._listener.getsockname()), ignore_errors=True)
        os._exit(0)

    def _preload(self, names: Sequence[str]) -> dict[str, Any]:
        """Import modules. One that fails is reported; a worker that needs it fails as it would have without a fork server."""
        failed = {}
        with ttp_importable():
            for name in names:
                try:
                    importlib.import_module(name)
                except (Exception, SystemExit) as error:
                    failed[name] = f"{type(error).__name__}: {error}"
        gc.collect()
        gc.freeze()  # else a collection in a worker would copy every page that holds an object
        loaded = {name: module for name, module in list(sys.modules.items()) if name not in AT_START}
        files = {name: file for name, module in loaded.items() if (file := getattr(module, "__file__", None))}
        self._stamps = {file: stamp for file in files.values() if (stamp := _stamp(file)) is not None}
        return {
            "failed": failed,
            "unusable": unusable(),
            "origins": {name: file for name, file in files.items() if "." not in name},
            "modules": len(loaded),
            "resident_bytes": _resident_bytes(),
        }

    def _fork(
        self, channel: socket.socket, request: dict[str, Any], descriptors: Sequence[int]
    ) -> ForkedProgram | None:
        """Fork the programs of a request and answer. They run only once the answer is sent: who has none executes them. Returns, in
        each of their processes, what it is to run. Raises OSError: the answer cannot be sent."""
        read_end, write_end = os.pipe()
        held, release = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            _close(read_end, write_end, held, release, *descriptors)
            frames.send(channel, {"pids": [], "error": f"fork: {error.strerror}"})
            return None
        if between == 0:
            _close(read_end, release)
            worker = self._fork_again(request, descriptors, write_end, held)
            channel.close()
            return worker
        _close(write_end, held)
        with open(read_end, encoding="ascii") as pipe:
            pids = [int(line) for line in pipe]
        _, status = os.waitpid(between, 0)  # from now on the agent is the workers' parent
        _close(*descriptors)
        error_number = abs(os.waitstatus_to_exitcode(status))
        with open(release, "wb", buffering=0) as held_workers:
            frames.send(channel, {"pids": pids, "error": f"fork: {os.strerror(error_number)}" if error_number else ""})
            if not error_number:
                held_workers.write(bytes(len(pids)))
        return None

    def _fork_again(
        self, request: dict[str, Any], descriptors: Sequence[int], write_end: int, held: int
    ) -> ForkedProgram:
        """Fork from a process that ends at once. Returns in the programs' processes only."""
        for number, program in enumerate(request["programs"]):
            try:
                pid = os.fork()
            except OSError as error:
                os._exit(error.errno or 1)
            if pid == 0:
                self._channel.close()
                if self._listener is not None:
                    self._listener.close()
                os.close(write_end)
                own = descriptors[3 * number : 3 * number + 3]
                others = [each for each in descriptors if each not in own]
                return ForkedProgram.become({**request, **program}, own, others, held, self._agent)
            with contextlib.suppress(OSError):  # the server is gone, and the program does not run
                os.write(write_end, f"{pid}\n".encode())
        os._exit(0)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def unusable() -> str:
    """Return why no worker can be forked from this process, empty when they can."""
    devices = sorted({path for path in _open_files() if path.startswith(DEVICE_FILES)})
    if devices:
        return f"an imported module opened {devices[0]}"
    pid = (
        os.fork()
    )  # some libraries end their threads before a fork (OpenBLAS), and some mark the child as broken (CUDA)
    if pid == 0:
        os._exit(BAD_FORK if _bad_fork() else 0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        return "an imported module initialized the accelerator"
    threads = len(os.listdir("/proc/self/task"))
    return f"an imported module started {threads - 1} threads" if threads > 1 else ""


def _bad_fork() -> bool:
    """Ask every back end in torch's namespace, its own and those that plug-ins register: each has this name, as torch asks it before it seeds."""
    torch = sys.modules.get("torch")
    backends = [] if torch is None else [each for each in vars(torch).values() if isinstance(each, ModuleType)]
    questions = [vars(backend).get("_is_in_bad_fork") for backend in backends]  # `getattr` would load some of them
    return any(question() for question in questions if question is not None)


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve, with the agent and the descriptors that the command line names; in a forked process, run its program."""
    show_as(sys.orig_argv[:-1])  # the last one makes room
    channel, *others = (socket.socket(fileno=int(word)) for word in sys.argv[2:-1])
    agent = int(sys.argv[1])
    if not others:  # one that listens removes its socket's directory first
        end_with_parent(signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(0)  # it was gone before
    RequestLoop(agent, channel, others[0] if others else None).serve().run()


if __name__ == "__main__":
    main()
