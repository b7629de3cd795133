"""Several nodes on one machine: network namespaces with cables between them that can be pulled, throttled and delayed.

Every node is a network namespace with a host name of its own and one cable (a veth pair) to a switch (a bridge in a
namespace of its own, so that the machine's own network is never touched). Paths may be private to a node, like its own disk.

    if reason := why_not():
        print("no nodes here:", reason)
    with Nodes(3) as (a, b, c):
        a.popen(["ttprun", ...])
        c.unplug()          # a cable is pulled: nothing arrives, nothing is closed
        b.power_off()       # a node is lost: its cable and all its processes at once
        a.throttle(10)      # a slow cable

Needs root and iproute2's `ip` and `tc`. All that is made is removed at the `with`'s end, however that comes: SIGTERM is an
exception in the main thread, as Ctrl-C is. What a harness left that was itself killed, the next one removes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

SUBNET = "10.77.0"
NAMESPACES = Path("/run/netns")
"""Where `ip netns` keeps them."""
NAME_FILES = Path("/etc/netns")
"""`ip netns exec` puts the files of a folder here, named as the namespace, in the place of those in /etc."""
KILL_S = 10.0
_OURS = re.compile(r"ttp-(\d+)-\d+-\w+")
_numbers = itertools.count()

_ENTER = """
hostname "$1"; shift
while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 125; shift 2; done
shift; exec "$@"
"""


class NodesError(RuntimeError):
    """The system refused what the harness needs; the message carries its words."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came. As Ctrl-C it is no `Exception`, and a test runner ends its session with all that was set up."""


@functools.cache
def why_not() -> str:
    """Say why nodes cannot be made here; empty when they can. Tries it."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    try:
        with Nodes(1) as (node,), tempfile.TemporaryFile() as output:
            if status := node.popen(["true"], output=output).wait():
                output.seek(0)
                raise NodesError(f"a program on a node ended with status {status}: {output.read().decode().strip()}")
    except (NodesError, OSError) as error:
        return f"the system does not allow network namespaces: {error}"
    return ""


class Node:
    """One node; made by `Nodes`."""

    def __init__(self, name: str, address: str, namespace: str, switch: str) -> None:
        self.name = name
        """Host name, by which all nodes know each other."""
        self.address = address
        self._namespace = namespace
        self._switch = switch
        self._forwarder: subprocess.Popen[bytes] | None = None
        """What makes the cable slow, where the kernel cannot."""

    def popen(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        private: Mapping[Path, Path] | None = None,
        output: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on this node, in a session of its own; its pid is the program's.

        environ: beside this process's. private: the folder (value) that the program finds at a path (key): its own disk.
        """
        binds = [str(word) for path, own in (private or {}).items() for word in (own, path)]
        enter = ["ip", "netns", "exec", self._namespace, "unshare", "--uts", "sh", "-c", _ENTER, "sh", self.name]
        return subprocess.Popen(
            [*enter, *binds, "--", *command],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )

    def pids(self) -> list[int]:
        """Return all processes of this node."""
        return [int(word) for word in _ip("netns", "pids", self._namespace).split()]

    def holds(self, pid: int) -> bool:
        """Say whether a process runs on this node."""
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino == (NAMESPACES / self._namespace).stat().st_ino
        except OSError:
            return False  # it has ended

    def kill_all(self) -> None:
        """SIGKILL every process of this node; return when all are gone."""
        deadline = time.monotonic() + KILL_S
        while pids := self._running():
            if time.monotonic() > deadline:
                raise NodesError(f"{self.name}: processes {pids} are still there {KILL_S:.0f} s after SIGKILL")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def reap(self) -> None:
        """Let go of what ran beside this node, which has ended."""
        if self._forwarder is not None:
            self._forwarder.communicate()
            self._forwarder = None

    def _running(self) -> list[int]:
        """Without the zombies, which are their parents' to reap."""
        return [pid for pid in self.pids() if _state_of(pid) not in ("Z", "X", "")]

    def unplug(self) -> None:
        """Pull the cable: nothing goes in or out any more, without a notice."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def plug(self) -> None:
        """Put the cable back."""
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def power_off(self) -> None:
        """Lose the node: first its cable, so that no goodbye of a dying process gets out, then all its processes.
        `plug` makes it a node again, with nothing running."""
        self.unplug()
        self.kill_all()

    def throttle(self, megabit_per_s: float) -> None:
        """Make the cable slow in both directions (a token bucket); packets wait, up to half a second's worth."""
        rate = f"{round(1000 * megabit_per_s)}kbit"
        for place, device in self._ends():
            _tc(
                place,
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "32kbit",
                "latency",
                "500ms",
            )

    def delay(self, milliseconds: float) -> None:
        """Make every packet take so much longer, in each direction; a later delay takes the place of an earlier one.

        By netem; where the kernel has none, a process forwards the packets later. Raises NodesError where it can do neither.
        """
        self.clear()
        try:
            for place, device in self._ends():
                _tc(place, "qdisc", "replace", "dev", device, "root", "netem", "delay", f"{milliseconds}ms")
        except NodesError as error:
            if "netem" not in str(error):
                raise
            self._forward_later(milliseconds)

    def _forward_later(self, milliseconds: float) -> None:
        """Put a process between the cable and the switch (`slow_cable.py`)."""
        program = [sys.executable, "-I", str(Path(__file__).with_name("slow_cable.py"))]
        forwarder = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, *program, self._port, self._tap, str(milliseconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._forwarder = forwarder
        assert forwarder.stdin is not None and forwarder.stdout is not None
        if (received := forwarder.stdout.readline()) != b"made\n":
            output = (received + forwarder.stdout.read()).decode(errors="replace").strip()
            self.clear()
            raise NodesError(
                f"{self.name}: no delay: the kernel has no netem, and frames cannot be forwarded: {output}"
            )
        _ip("-n", self._switch, "link", "set", self._tap, "master", "bridge", "up")
        _ip("-n", self._switch, "link", "set", self._port, "nomaster")
        forwarder.stdin.write(b"go\n")
        forwarder.stdin.flush()

    def clear(self) -> None:
        """End throttle and delay. May be called again."""
        if self._forwarder is not None:
            forwarder, self._forwarder = self._forwarder, None
            forwarder.kill()
            forwarder.communicate()
            _ip("-n", self._switch, "link", "set", self._port, "master", "bridge")
        for place, device in self._ends():
            shown = _tc(place, "qdisc", "show", "dev", device).split()  # `qdisc tbf 8001: root ...`
            if shown and shown[2] != "0:":  # the kernel's own, which cannot be removed
                _tc(place, "qdisc", "del", "dev", device, "root")

    @property
    def _port(self) -> str:
        return f"to-{self.name}"

    @property
    def _tap(self) -> str:
        return f"slow-{self.name}"

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self._namespace, "eth0"), (self._switch, self._port)


class Nodes:
    """So many nodes (`node-a`, `node-b`, ...) on one switch. Use as a context manager."""

    def __init__(self, count: int) -> None:
        if not 1 <= count <= 26:
            raise ValueError(f"count: got {count}, expected 1 to 26 nodes")
        prefix = f"ttp-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{prefix}-switch"
        names = [f"node-{chr(ord('a') + number)}" for number in range(count)]
        self.nodes = tuple(
            Node(name, f"{SUBNET}.{number + 1}", f"{prefix}-{name[-1]}", self._switch)
            for number, name in enumerate(names)
        )
        self._forwards_sigterm = False

    def __enter__(self) -> tuple[Node, ...]:
        self._handle_sigterm()
        try:
            remove_orphans()
            self._make()
        except BaseException:
            self.remove()
            raise
        return self.nodes

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
        if isinstance(value, Terminated) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)  # end as what was sent: all is removed

    def _handle_sigterm(self) -> None:
        """Make SIGTERM an exception, where the program has no handler of its own."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)
            self._forwards_sigterm = True

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in self.nodes)
        for node in self.nodes:
            space, port = node._namespace, node._port
            _ip("netns", "add", space)
            folder = NAME_FILES / space
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(hosts)
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Kill what runs on the nodes, and remove them. May be called again; does the rest."""
        for space in (*(node._namespace for node in self.nodes), self._switch):
            _remove(space)
        for node in self.nodes:
            node.reap()
        if self._forwards_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._forwards_sigterm = False


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number).name)


def remove_orphans() -> None:
    """Remove the nodes of harnesses that ended without doing so (killed)."""
    for space in _namespaces():
        match = _OURS.fullmatch(space)
        if match is not None and not _state_of(int(match.group(1))):
            _remove(space)


def _remove(space: str) -> None:
    if space in _namespaces():
        try:
            Node("", "", space, "").kill_all()
            _ip("netns", "del", space)
        except NodesError:
            if space in _namespaces():  # else another harness that found it has removed it
                raise
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(NAME_FILES / space)
    with contextlib.suppress(OSError):
        NAME_FILES.rmdir()  # stays where others have names


def _namespaces() -> Iterator[str]:
    yield from [line.split()[0] for line in _ip("netns", "list").splitlines() if line]


def _state_of(pid: int) -> str:
    """Return the process's state letter, empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _tc(namespace: str, *arguments: str) -> str:
    return _run(["tc", "-n", namespace, *arguments])


def _run(command: list[str]) -> str:
    done: Any = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NodesError(f"`{' '.join(command)}`: {done.stderr.strip() or done.stdout.strip()}")
    out: str = done.stdout
    return out
