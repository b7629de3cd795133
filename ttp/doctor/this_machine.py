"""What this node must have for a run: versions, a device, shared memory, ports, names, limits, warm starts.

Owns the checks that need no directory and no other node. Changes nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ttp import config
from ttp.addresses import LOOPBACK, address_of, listen
from ttp.copies.node_limits import process_limits
from ttp.doctor.finding import FAILED, OK, WARNING, Finding, judged
from ttp.errors import ConfigError
from ttp.exchange.discovery import why_unknown
from ttp.fork_server.client import ForkServer, Program
from ttp.fork_server.preload import for_workers
from ttp.fork_server.request import NotForked
from ttp.selftest.probe_process import ProbeFailed, probe
from ttp.text.wording import counted, size_text
from ttp.torch_range import TESTED, untested
from ttp.version import VERSION

CONNECT_S = 5.0
LOOK_UPS, LOOK_UP_S = 30, 0.5
"""torch's stores look the name of each address up that connects (`getnameinfo`), and answer no other client meanwhile."""
FORKED_S = 30.0
SHM = Path("/dev/shm")
SHM_BYTES = 1 << 30
"""What NCCL's documentation has containers of several devices set (`--shm-size=1g`)."""
SHM_RANK_BYTES = 64 << 20
"""A rank's data loaders pass batches through it."""
OPEN_FILES, OPEN_FILES_A_RANK = 1024, 4
"""Of a process; the stores of rank 0's node have connections of every rank of the job."""
PROCESSES_A_RANK = 256
"""Threads count: of torch, gRPC, data loaders."""
LOCKED_BYTES = 1 << 30
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/davinci[0-9]*", "/dev/mtgpu*", "/dev/kfd")
_RDMA = "/dev/infiniband/uverbs*"
_CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


def check(device: str, ranks: int, nodes: int, named: Sequence[str]) -> Iterator[Finding]:
    """Yield what is found. `ranks`: of this node. `named`: other nodes, as they will be named."""
    yield from versions()
    yield from settings()
    found = device_finding(device, ranks)
    yield found
    host = found.figures.get("type") in (None, "cpu")
    yield shared_memory(ranks, host)
    yield from names(nodes, named)
    yield address_look_ups((address_of(config.host_name()) if nodes > 1 else "") or LOOPBACK)
    yield port(nodes)
    yield from limits(ranks, ranks * nodes, host)
    yield warm_start()


def versions() -> Iterator[Finding]:
    """Yield whether torch is one that TTP is tested with."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        yield Finding("torch", FAILED, "is not installed", f"torch {TESTED[0]} to {TESTED[1]}", "Install it")
        return
    python = ".".join(map(str, sys.version_info[:3]))
    found = f"torch {installed}, Python {python}, TTP {VERSION}"
    warning = untested(installed)
    do = "Install one of these, or run `make demo` with this one first"
    yield judged(
        "versions",
        not warning,
        found,
        f"torch {TESTED[0]} to {TESTED[1]}",
        do,
        torch=installed,
        python=python,
        ttp=VERSION,
    )


def settings() -> Iterator[Finding]:
    """Yield whether TTP's variables are values that it takes."""
    try:
        config.Settings.from_env()
    except ConfigError as error:
        yield Finding("settings", FAILED, str(error), "values that docs/settings.md lists", "Correct the variable")
        return
    unknown = config.unknown_variables()
    shown = ", ".join(f"{name} (nearest: {near})" if near else name for name, near in sorted(unknown.items()))
    yield judged("settings", not unknown, f"nothing reads {shown}" if unknown else "TTP's variables are valid",
                 "variables that docs/settings.md lists", "Correct the name, or unset it")  # fmt: skip


def device_finding(name: str, ranks: int) -> Finding:
    """Look at the device in a process of its own: one that is broken may end or hang it."""
    try:
        answer = probe(name)
    except ConfigError as error:
        return Finding(
            "device",
            FAILED,
            str(error),
            "a device of this node",
            "Name another one with --device, or install its driver and plug-in",
        )
    except ProbeFailed as error:
        return Finding(
            "device", FAILED, str(error), "a device that can be used", "Look into its driver; `ttp selftest` tries more"
        )
    device, count = answer["device"], int(answer["device"]["count"])
    figures = {"type": device["type"], "count": count}
    if count == 0:
        others = [path for pattern in _DEVICE_FILES for path in glob.glob(pattern)]
        return judged("device", name != "auto" or not others, f"the CPU{f', though there is {others[0]}' if others else ''}", "the node's device",
                      "Install the build of torch, or the plug-in, for it; or name the device with --device", **figures)  # fmt: skip
    found = f"{counted(count, device['type'] + ' device')}: {device['name']}, driver {device['driver']}"
    if count < ranks:
        return Finding(
            "device",
            FAILED,
            found,
            f"{ranks}, one for each rank of this node",
            "Start fewer ranks (--nproc-per-node)",
            figures,
        )
    broken = [each["reason"] for each in answer["checks"] if each["status"] == "failed"]
    do = "`ttp selftest` tries more, and makes a report"
    return judged(
        "device", not broken, "; ".join([found, *broken]), "streams and events that work", do, bad=FAILED, **figures
    )


def shared_memory(ranks: int, host: bool) -> Finding:
    """Look at the memory that processes share: collectives of devices on one node, and data loaders."""
    needed = max(SHM_RANK_BYTES * ranks, 0 if host else SHM_BYTES)
    do = "Give the container more (`--shm-size`, or an emptyDir of medium Memory at /dev/shm)"
    try:
        with tempfile.TemporaryFile(dir=SHM):
            free = shutil.disk_usage(SHM).free
    except OSError as error:
        return Finding(
            "shared memory", WARNING, f"{SHM} cannot be written: {error.strerror or error}", size_text(needed), do
        )
    return judged("shared memory", free >= needed, f"{size_text(free)} are free in {SHM}", f"{size_text(needed)} for {counted(ranks, 'rank')}", do,
                  free_bytes=free, needed_bytes=needed)  # fmt: skip


def names(nodes: int, named: Sequence[str]) -> Iterator[Finding]:
    """Yield whether this node's name leads to it, and the others' anywhere."""
    own = config.host_name()
    do = "Set TTP_HOST to a name or an address that all nodes know"
    if error := why_unknown(own, 0.0):
        bad = FAILED if nodes > 1 else WARNING
        yield Finding("name of this node", bad, f"{own} does not resolve here: {error}", "an address of this node", do)
    elif nodes > 1 and not (address := address_of(own)):
        found = f"{own} leads to the loopback interface, to several addresses, or to none of this node"
        yield Finding(
            "name of this node", WARNING, found, "one address that the other nodes reach", f"{do}, and --local-addr"
        )
    else:
        address = address if nodes > 1 else ""
        yield Finding("name of this node", OK, f"{own}{f' is {address}' if address else ' resolves'}")
    for other in named:
        error = why_unknown(other, 0.0)
        yield judged(f"name {other}", not error, f"does not resolve here: {error}" if error else "resolves here",
                     "a name that every node knows", "Correct it, DNS or /etc/hosts", bad=FAILED)  # fmt: skip


def address_look_ups(address: str) -> Finding:
    """Look up the name of an address of this node again and again, as torch's stores do: an answer of DNS that is lost costs seconds."""
    asked = (
        address if ":" in address else f"::ffff:{address}"
    )  # so an address of version 4 looks to a socket that takes both
    slowest_s, number = 0.0, 0
    while slowest_s <= LOOK_UP_S and number < LOOK_UPS:
        number, began_s = number + 1, time.monotonic()
        with contextlib.suppress(OSError):  # it has no name: an answer like another
            socket.getnameinfo((asked, 1, 0, 0), 0)
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    return judged("names of addresses", slowest_s <= LOOK_UP_S, f"the slowest of {number} look-ups of {asked} took {slowest_s:.2g} s",
                  f"{LOOK_UP_S:g} s: each process that connects to a store of torch's waits for one, and so do the others",
                  f"Add a line `{asked} NAME` to /etc/hosts here, for the other nodes too, or look at the DNS server", look_up_s=slowest_s)  # fmt: skip


def port(nodes: int) -> Finding:
    """Listen where the controller would, and connect to it as the other ranks would."""
    asked = config.Settings.from_env().controller_port if _valid() else 0
    host = "127.0.0.1" if nodes == 1 else config.host_name()
    what = f"port {asked}" if asked else "a free port"
    do = (
        "Free the port, or set TTP_CONTROLLER_PORT to another one"
        if asked
        else "Look at this node's firewall and its name"
    )
    try:
        with contextlib.ExitStack() as sockets:
            server = sockets.enter_context(listen("" if nodes > 1 else host, asked))
            caller = sockets.enter_context(socket.create_connection((host, server.getsockname()[1]), CONNECT_S))
            server.settimeout(CONNECT_S)
            sockets.enter_context(server.accept()[0]).sendall(b"!")
            caller.recv(1)
    except (OSError, UnicodeError) as error:
        return Finding(
            "ports",
            FAILED,
            f"{what} cannot be reached as {host}: {getattr(error, 'strerror', None) or error}",
            "a port that ranks can connect to",
            do,
        )
    return Finding("ports", OK, f"{what} listens, and is reached as {host}")


def _valid() -> bool:
    try:
        config.Settings.from_env()
    except ConfigError:
        return False
    return True


def limits(ranks: int, world_size: int, host: bool) -> Iterator[Finding]:
    """Yield the limits of processes that this one has, which ttprun and its ranks inherit, and of its container."""
    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], OPEN_FILES + OPEN_FILES_A_RANK * world_size
    yield judged("open files", _reaches(files, needed), f"{_limit_text(files)} for a process", f"{needed} for {counted(world_size, 'rank')}",
                 f"ulimit -n {needed}", limit=files)  # fmt: skip
    processes, needed = resource.getrlimit(resource.RLIMIT_NPROC)[0], PROCESSES_A_RANK * (ranks + 1)
    least = min(process_limits(), key=lambda one: one.available, default=None)
    if least is not None and least.available < needed:
        yield Finding("processes", WARNING, f"{least.available:,} more processes and threads ({least.source}: {least.total:,})", str(needed),
                      "Give the container more (`--pids-limit`, or podPidsLimit of the kubelet)", {"limit": least.total})  # fmt: skip
    else:
        yield judged("processes", _reaches(processes, needed), f"{_limit_text(processes)} processes and threads of this user", str(needed),
                     f"ulimit -u {needed}", limit=processes)  # fmt: skip
    core = resource.getrlimit(resource.RLIMIT_CORE)[0]
    yield judged("core dumps", core == 0 or _goes_to_a_program(), "off" if core == 0 else f"on ({_limit_text(core)} bytes)", "off",
                 "A rank that crashes writes its whole memory to a file before it has ended, and the fault waits for it: ulimit -c 0", limit=core)  # fmt: skip
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = not host and bool(glob.glob(_RDMA))
    yield judged("locked memory", not rdma or _reaches(locked, LOCKED_BYTES), f"{_limit_text(locked)} bytes",
                 "no limit: this node has RDMA devices, whose buffers are locked", "ulimit -l unlimited, or `--ulimit memlock=-1` of the container",
                 limit=locked)  # fmt: skip


def _reaches(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def _limit_text(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _goes_to_a_program() -> bool:
    """A handler reads the dump from a pipe, under limits of its own."""
    try:
        return _CORE_PATTERN.read_text().startswith("|")
    except OSError:
        return False


def warm_start(modules: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Finding:
    """Fork a process as ttprun would fork its workers."""
    try:
        if not config.warm_start(environ):
            return Finding("warm starts", OK, "off (TTP_WARM_START, ENABLE_TTP): workers are executed")
    except ConfigError as error:
        return Finding("warm starts", FAILED, str(error), "True or False", "Correct the variable")
    server, began = ForkServer(modules or for_workers()), time.monotonic()
    program = Program((sys.executable, "-u", "-m", "ttp.version"), environ)
    try:
        server.start({"OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0", **environ})
        server.prepare(program.argv, environ)
        (child,) = server.fork([program])
        status, reason = child.wait(FORKED_S), ""
    except (NotForked, OSError, subprocess.TimeoutExpired) as error:
        status, reason = 1, str(error)
    finally:
        server.close()
    seconds = time.monotonic() - began
    found = (
        f"imports and a fork took {seconds:.1f} s" if status == 0 else reason or f"a forked process ended with {status}"
    )
    do = "Workers are executed then, and each imports torch anew at a restart: see docs/warm_starts.md"
    return judged("warm starts", status == 0, found, "a process that forks the workers", do, seconds=round(seconds, 3))
