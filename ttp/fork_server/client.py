"""The agent's side of its fork server: starts it, has workers forked, and knows what cannot be forked.

Owns the server's process and the one channel to it. A server that dies or does not answer costs an attempt its speed, never the job: the workers
are executed then, as torchrun does, and the next attempt has a new server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp import files
from ttp.fork_server import frames
from ttp.fork_server.forked_process import ForkedChild
from ttp.fork_server.kill import kill_and_wait
from ttp.fork_server.linux import adopting_orphans
from ttp.fork_server.preload import NO_THREADS, read_at_import, shadowing, without_workers_own
from ttp.fork_server.request import NotForked

log = logging.getLogger("ttp.launch")

PROGRAM = Path(__file__).with_name("request_loop.py")
PRELOAD_S = 120.0
"""How long an attempt waits for the imports; then its workers import for themselves."""
ANSWER_S = 30.0
"""How long the forks of an attempt may take."""
ONE_S = 5.0
"""The same of one worker that is forked while others run: what waits for it can do without."""
CLOSE_S = 1.0
MOST_DEATHS = 3
"""So many servers in a row are lost without having forked a worker, and there is no further one."""
MOST_AT_ONCE = 64
"""Workers that one request has forked: three descriptors each."""
MOST_NAMES = 8
PREFIX = "ttp_fork_server_"
BACKLOG = 16
_ROOM = 8192
"""Bytes beyond the agent's own arguments and variables for those of a worker, which `ps` shows."""


class Listener:
    """A socket in a directory that only this user can enter, where a server takes requests of other processes than its agent."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._directory = files.make_temporary(PREFIX)
        self.path = self._directory / "socket"
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            files.bind(self.socket, self.path)
            self.socket.listen(BACKLOG)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self.socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Program:
    """What one worker runs."""

    argv: tuple[str, ...]
    """This interpreter, `-u`, and a script, or `-m` and a module; its arguments."""
    environ: Mapping[str, str]
    descriptors: tuple[int, int, int] = (0, 1, 2)
    """What it has as stdin, stdout and stderr; one that is not open is replaced by /dev/null."""

    @property
    def request(self) -> dict[str, Any]:
        return {"argv": list(self.argv), "environ": dict(self.environ)}


class ForkServer:
    """Forks this node's workers, or its controllers. The agent's main thread owns it: the server ends with the thread that started it. Only
    `fork_one` may be called from another thread."""

    def __init__(self, modules: Sequence[str], listener: Listener | None = None) -> None:
        """`modules`: what the server imports, in this order. `listener`: where it takes requests of others (`request.fork_at`)."""
        self._modules = tuple(modules)
        self._listener = listener
        self._lock = threading.RLock()
        """Held while the channel is used, and while the server is started or ended."""
        self._added: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unanswered = 0
        self._environ: dict[str, str] = {}
        self._imported: dict[str, Any] = {}
        self._deaths = 0
        self._reason = ""
        """Why there is no server; empty: there is one, or the next attempt makes one."""

    @property
    def pid(self) -> int:
        """The server's process, 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def address(self) -> str:
        """Where others' requests are taken; empty: nowhere."""
        return str(self._listener.path) if self._listener is not None and self._process is not None else ""

    @property
    def description(self) -> str:
        """The server for a log line."""
        megabytes = self._imported.get("resident_bytes", 0) >> 20
        return f"process {self.pid}, {self._imported.get('modules', 0)} modules, {megabytes} MB"

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the server and its imports, without waiting for them. `environ`: what the workers are to have, but for what is each one's
        own."""
        with self._lock:
            self._start(environ)

    def _start(self, environ: Mapping[str, str]) -> None:
        self._end()
        self._environ = without_workers_own(environ)
        listening = [str(self._listener.socket.fileno())] if self._listener is not None else []
        room = _ROOM + sum(len(os.fsencode(word)) + 1 for word in sys.argv)
        try:
            ours, theirs = socket.socketpair()
            with theirs, contextlib.ExitStack() as failed:
                failed.enter_context(ours)
                sockets = [str(theirs.fileno()), *listening]
                self._process = subprocess.Popen(
                    [sys.executable, "-u", str(PROGRAM), str(os.getpid()), *sockets, "-" * room],
                    stdin=subprocess.DEVNULL,
                    env={**NO_THREADS, **self._environ, "_TTP_ROOM": "-" * _ROOM},
                    pass_fds=[*map(int, sockets)],
                    start_new_session=True,
                )
                failed.pop_all()
        except OSError as error:
            self._reason = f"the fork server cannot be started: {error}"
            return
        self._channel = ours
        with contextlib.suppress(OSError):  # it has ended already, and whoever asks it will know
            self._send({"kind": "preload", "modules": [*self._modules, *self._added]})

    def look(self) -> None:
        """Start the server again when it has died; later if a worker is being forked now."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._process is not None and self._process.poll() is not None:
                lost = self._lost(f"exit status {self._process.returncode}")
                if not self._reason:
                    log.info("%s; starting another one", lost)
                    self.start(self._environ)
        finally:
            self._lock.release()

    def also_import(self, modules: Sequence[str]) -> None:
        """Have the server, or the next one, import more; not waited for."""
        with self._lock:
            added = [name for name in modules if name not in self._modules and name not in self._added]
            self._added += added
            if added and self._channel is not None:
                with contextlib.suppress(OSError):
                    self._send({"kind": "preload", "modules": added})

    def prepare(self, args: Sequence[str], environ: Mapping[str, str]) -> None:
        """Have a server ready that can fork this command. Raises NotForked.

        args: the interpreter and its arguments. environ: a worker's variables.
        """
        with self._lock:
            self._prepare(args, environ)

    def _prepare(self, args: Sequence[str], environ: Mapping[str, str]) -> None:
        if reason := not_forkable(args):
            self._end()
            raise NotForked(reason)
        self.look()
        if self._channel is None:
            if self._reason:
                raise NotForked(self._reason)
            self.start(environ)
        elif (theirs := read_at_import(environ)) != (ours := read_at_import(self._environ)):
            names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            log.info("importing all anew, with the workers' %s", ", ".join(names))
            self.start(environ)
        self._await_imports()
        if changed := self._ask({"kind": "check"}, ANSWER_S)["changed"]:
            log.info("%s has changed since it was imported: importing all anew", changed[0])
            self.start(self._environ)
            self._await_imports()
        try:
            here = os.getcwd()
        except OSError as error:
            raise NotForked(f"the current folder cannot be entered: {error.strerror}") from error
        folder = here if args[2] == "-m" else os.path.dirname(os.path.realpath(args[2]))
        if hidden := shadowing(folder, self._imported["origins"]):
            raise NotForked(f"{os.path.join(folder, hidden)} hides a module of that name that was preloaded")

    def fork(self, programs: Sequence[Program]) -> list[ForkedChild]:
        """Fork workers (after `prepare`), as `subprocess.Popen` would start each in a session of its own. Raises NotForked: not all were
        forked, and those that were have been killed."""
        with self._lock:
            return self._fork(programs, ANSWER_S)

    def fork_one(self, program: Program) -> ForkedChild:
        """Fork one worker more of those that `prepare` was called for, from any thread; never starts a server. Takes ONE_S at most for each of
        its turn, imports that are under way, the check and the fork. Raises NotForked, also where a module has changed on disk since it was imported:
        what the worker imports itself may fit the new one only.
        """
        if not self._lock.acquire(timeout=ONE_S):
            raise NotForked("the fork server is busy")
        try:
            if self._channel is None:
                raise NotForked(self._reason or "there is no fork server")
            if read_at_import(program.environ) != read_at_import(self._environ):
                raise NotForked("the fork server has imported with other variables than the workers'")
            self._take_imports(ONE_S)
            if reason := self._imported["unusable"]:
                raise NotForked(reason)
            if changed := self._ask({"kind": "check"}, ONE_S)["changed"]:
                raise NotForked(f"{changed[0]} has changed since the workers were started")
            return self._fork([program], ONE_S)[0]
        finally:
            self._lock.release()

    def _fork(self, programs: Sequence[Program], answer_s: float) -> list[ForkedChild]:
        children: list[ForkedChild] = []
        try:
            for first in range(0, len(programs), MOST_AT_ONCE):
                some = programs[first : first + MOST_AT_ONCE]
                answer = self._ask_to_fork(some, answer_s)
                children += [ForkedChild(pid, one.argv) for pid, one in zip(answer["pids"], some, strict=False)]
                if answer["error"]:
                    raise NotForked(answer["error"])
        except BaseException:  # a signal, too: the caller does not know of them
            kill_and_wait("workers that were forked", children)
            raise
        self._deaths = 0
        return children

    def _ask_to_fork(self, programs: Sequence[Program], answer_s: float) -> dict[str, Any]:
        """Return the answer about one batch. Raises NotForked."""
        try:
            request = {
                "kind": "fork",
                "adopted": True,
                "folder": os.getcwd(),
                "programs": [one.request for one in programs],
            }
            with open(os.devnull, "r+b", buffering=0) as null, adopting_orphans():
                given = [descriptor for one in programs for descriptor in one.descriptors]
                descriptors = [number if _is_open(number) else null.fileno() for number in given]
                return self._ask(request, answer_s, descriptors)
        except OSError as error:
            raise NotForked(f"the fork server did not fork: {error}") from error

    def close(self) -> None:
        """End the server, for good."""
        with self._lock:
            self._end()
        if self._listener is not None:
            self._listener.close()

    def _end(self) -> None:
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        imports, self._unanswered, self._imported = self._unanswered > 0, 0, {}
        if channel is not None:
            channel.close()
        if process is not None:
            try:
                process.wait(0.0 if imports else CLOSE_S)
            except subprocess.TimeoutExpired:
                kill_and_wait("the fork server", [process])

    def _await_imports(self) -> None:
        """Take in the answers about imports. Raises NotForked."""
        if self._channel is None:
            raise NotForked(self._reason or "there is no fork server")
        self._take_imports()
        if not (reason := self._imported["unusable"]):
            return
        if not self._added:
            raise NotForked(reason)
        log.info("%s: starting another fork server without %s", reason, names_text(self._added))
        self._added = []
        self.start(self._environ)
        self._await_imports()

    def _take_imports(self, within_s: float | None = None) -> None:
        """Take in the answers that are owed. Raises NotForked, also where they take longer than `within_s`: the server is kept then."""
        until_s = None if within_s is None else time.monotonic() + within_s
        while self._unanswered:
            assert self._channel is not None
            if until_s is not None and not frames.readable(self._channel, until_s - time.monotonic()):
                raise NotForked("the fork server still imports")
            self._imported = self._receive(PRELOAD_S)
            failed = self._imported["failed"]
            for name, error in failed.items():
                log.debug("the fork server could not import %s: %s", name, error)
            if added := [name for name in failed if name in self._added]:
                log.warning("the fork server cannot import %s (%s)", names_text(added), failed[added[0]])

    def _ask(self, request: dict[str, Any], timeout_s: float, descriptors: Sequence[int] = ()) -> dict[str, Any]:
        self._await_imports()
        try:
            self._send(request, descriptors)
        except OSError as error:
            raise self._lost(str(error)) from error
        return self._receive(timeout_s)

    def _send(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._channel is not None
        self._unanswered += (
            1  # also where nothing is sent: whoever waits for the answer finds that the server has ended
        )
        frames.send(self._channel, request, descriptors)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._channel is not None
        self._channel.settimeout(timeout_s)
        try:
            answer, _ = frames.receive(self._channel)
        except (EOFError, OSError) as error:
            raise self._lost(str(error)) from error
        except BaseException:  # a signal: the answer would be taken for another one's
            self._end()
            raise
        self._unanswered -= 1
        return answer

    def _lost(self, error: str) -> NotForked:
        """Give up a server that has ended or does not answer; the next attempt has another one, unless too many were lost in a row."""
        self._end()
        self._deaths += 1
        reason = f"the fork server was lost: {error}"
        if self._deaths >= MOST_DEATHS:
            self._reason = f"{self._deaths} fork servers in a row were lost, the last one: {error}"
            log.warning("%s; what it would fork is executed from now on", self._reason)
            if self._listener is not None:
                self._listener.close()  # else those who ask wait for an answer
        return NotForked(reason)


def names_text(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} modules that earlier workers imported"


def not_forkable(args: Sequence[str]) -> str:
    """Return why a command is not one that is forked; empty for a script or a module in this interpreter."""
    if len(args) < 3 or args[0] != sys.executable or args[1] != "-u":
        return f"{args[0]} is not this Python interpreter"
    if args[2] == "-m":
        return "" if len(args) > 3 else "no module is named"
    if args[2].startswith("-"):
        return f"Python's option {args[2]} is for a new interpreter"
    if not os.path.isfile(args[2]) or zipfile.is_zipfile(args[2]):
        return f"{args[2]} is not a Python file"
    return ""


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
