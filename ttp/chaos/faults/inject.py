"""Faults at chosen places of a training step or of a dump, for tests and demonstrations.

`TTP_FAULTS` holds one or more faults, separated by `;`:

    kill:rank=2,step=7,point=updating          SIGKILL to itself in the middle of rank 2's update of step 7
    raise:rank=0,step=3,point=backward         an exception in the training thread
    stop:rank=1,step=5,point=ready             SIGSTOP
    exit:rank=1,step=5,point=done              os._exit(1)
    hang:rank=1,step=5,point=backward          the thread sleeps for ever; the process's other threads run on
    gil:rank=1,step=5,point=backward           it sleeps for ever with Python's lock held: no other thread runs
    gil:rank=1,step=5,point=backward,for=6     the same for 6 s, as a compiler does
    slow:rank=1,step=5,point=backward,for=3    it sleeps for 3 s and goes on
    segv, abort                                an invalid memory access, abort()
    term                                       SIGTERM to itself; goes on
    async:rank=1,step=5,point=backward         an exception that comes over the main thread at any later instruction
    cpu:rank=1,step=5,point=ready,for=3        two threads of its own count for 3 s; goes on meanwhile
    memory:rank=1,step=5,point=ready,mib=512,for=3    so much more memory is filled, and given back after 3 s
    kill:rank=1,step=9,point=ready,round=1     in the job's second attempt (default: round=0)
    kill:rank=1,step=4,point=write,call=1      while it writes step 4, when one system call that matters was done
    kill:rank=1,step=4,point=publish,call=rename.1    while it publishes step 4, when one rename was done, at the second
    kill:rank=1,step=4,point=publish,call=iter_0000004.0    ..., at the first system call to that name
    kill:rank=1,step=9,point=ready,again=1     in a process that takes the place of one that was lost in the same attempt (default: in the first)
    kill:rank=1,point=loaded,round=1           while it resumes (points of an attempt's startup have no step)
    enospc:..., eio:...                        the system call fails so (points write and publish only)
    slowdisk:...,for=0.2                       every such system call takes so much longer
    torn:...                                   the write is said to be done, but half of the last file is missing
    enospc:...,times=1                         the first write (or publish) of that step only, so one directory (default: all)

Points, in the order of a step: backward (reductions of this step have begun), ready (own reduced gradients are final),
record (commit record in hand, update not begun), updating (some shards updated, some not), done (update finished),
gathering (parameters half gathered). Of an attempt's startup: start (`ttp.start` begins), protected (all ranks are registered), resume
(a checkpoint was chosen, nothing read), loaded (its bytes are read, the optimizer has not taken them over). In a dump (step: the one that is written): write, publish; `call` counts the system
calls that make bytes and names durable (`ttp.chaos.faults.disk`). The faults are real: a signal, an exception, an exit, a system
call that fails. Owns nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttp.config import MOST_S
from ttp.errors import ConfigError
from ttp.inputs import checked

POINTS = ("backward", "ready", "record", "updating", "done", "gathering")
START_POINTS = ("start", "protected", "resume", "loaded")
DUMP_POINTS = ("write", "publish")
DISK_ACTIONS = ("enospc", "eio", "torn", "slowdisk")
RANK_ACTIONS = (
    "kill",
    "raise",
    "async",
    "stop",
    "exit",
    "hang",
    "gil",
    "slow",
    "cpu",
    "memory",
    "segv",
    "abort",
    "term",
)
ACTIONS = (*RANK_ACTIONS, *DISK_ACTIONS)
_FIELDS = {
    "rank": int,
    "step": int,
    "point": str,
    "round": int,
    "again": int,
    "call": str,
    "times": int,
    "for": float,
    "mib": int,
}
_HOG_THREADS = 2
_FOR_GOOD_S = 1e6
_CHUNK = bytes(1 << 20)
_MOST = 2**31 - 1
_MOST_MIB = 1 << 24


class InjectedFault(RuntimeError):
    """The exception that `raise` throws."""


class AsynchronousFault(InjectedFault):
    """The exception that `async` throws; Python makes it without arguments."""

    def __str__(self) -> str:
        return "fault injected from another thread"


@dataclass(frozen=True, slots=True)
class Injection:
    action: str
    rank: int
    step: int
    point: str
    round: int = 0
    again: int = 0
    """1: in a process that takes the place of a lost one."""
    call: int = 0
    """In a dump: how many system calls that matter go well before."""
    call_name: str = ""
    """Only calls of this name, or to a file of this name, count; empty: all."""
    times: int = 1_000_000
    """In a dump: how many writes or publishes of the step it hits."""
    for_s: float = 0.0
    """How long `slow` sleeps, `gil` holds the lock (0: for good), a hog lasts; by how much `slowdisk` makes a system call longer."""
    mib: int = 0
    """What `memory` fills."""


def parse_faults(text: str) -> tuple[Injection, ...]:
    """Parse TTP_FAULTS. Raises ConfigError that names the fault and what was expected."""
    return tuple(_parse_fault(part.strip()) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Injection:
    action, _, rest = text.partition(":")
    fields: dict[str, str] = {}
    for pair in rest.split(","):
        name, sep, value = pair.partition("=")
        if not sep or name.strip() in fields:
            raise ConfigError(f"TTP_FAULTS: {_shown(text)}: got {_shown(pair)}, expected name=value once each")
        fields[name.strip()] = value.strip()
    unknown, missing = set(fields) - set(_FIELDS), {"rank", "step", "point"} - set(fields)
    at_start = fields.get("point") in START_POINTS
    missing -= {"step"} if at_start else set()
    known = action in ACTIONS and fields.get("point") in (*POINTS, *START_POINTS, *DUMP_POINTS)
    in_dump = fields.get("point") in DUMP_POINTS
    misplaced = not in_dump and ({"call", "times"} & set(fields) or action in DISK_ACTIONS)
    misplaced = misplaced or (at_start and "step" in fields)
    if not known or unknown or missing or misplaced:
        raise ConfigError(
            f"TTP_FAULTS: got {_shown(text)}, expected ACTION:rank=R,step=S,point=P[,round=N][,again=1][,call=[NAME.]C][,times=T][,for=SECONDS][,mib=N] with ACTION one"
            f" of {', '.join(ACTIONS)} and P one of {', '.join((*POINTS, *START_POINTS, *DUMP_POINTS))};"
            f" {', '.join(DISK_ACTIONS)}, call and times belong to {' and '.join(DUMP_POINTS)}; no step at"
            f" {', '.join(START_POINTS)}"
        )
    try:
        values: dict[str, Any] = {name: _FIELDS[name](value) for name, value in fields.items()}
        values["call_name"], _, call = fields.get("call", "0").rpartition(".")
        values["call"] = int(call)
    except ValueError:
        raise ConfigError(
            f"TTP_FAULTS: {_shown(text)}: rank, step, round, again, call, times and mib must be integers, for a number"
        ) from None
    values["for_s"] = values.pop("for", 0.0)
    numbers = [value for name, value in values.items() if type(value) is int and name != "mib"]
    if not all(0 <= number <= _MOST for number in numbers) or not 0 <= values.get("mib", 0) <= _MOST_MIB:
        raise ConfigError(f"TTP_FAULTS: {_shown(text)}: numbers must be from 0 to {_MOST}, mib up to {_MOST_MIB}")
    if not 0 <= values["for_s"] <= MOST_S:
        raise ConfigError(f"TTP_FAULTS: {_shown(text)}: for must be seconds from 0 to {MOST_S:g}")
    return Injection(action, **{"step": 0, **values})


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 200 else checked.shown(text)


def injector(
    faults: tuple[Injection, ...], rank: int, round_number: int, again: bool = False
) -> Callable[[str, int], None] | None:
    """Return the hook for this rank's optimizer (`on_point`), or None when no fault is meant for it."""
    mine = {(f.point, f.step): f for f in meant_for(faults, rank, round_number, again) if f.point in POINTS}
    if not mine:
        return None

    def on_point(point: str, step: int) -> None:
        fault = mine.pop((point, step), None)  # once: backward passes its point once a bucket
        if fault is not None:
            commit(fault)

    return on_point


def start_injector(
    faults: tuple[Injection, ...], rank: int, round_number: int, again: bool = False
) -> Callable[[str], None]:
    """Return what this rank's session calls at each point of an attempt's startup."""
    mine = [f for f in meant_for(faults, rank, round_number, again) if f.point in START_POINTS]

    def at_point(point: str) -> None:
        for fault in mine:
            if fault.point == point:
                commit(fault)

    return at_point


def meant_for(
    faults: tuple[Injection, ...], rank: int, round_number: int, again: bool = False
) -> tuple[Injection, ...]:
    """Return the faults of this rank in this attempt of the job; `again`: this process takes the place of a lost one."""
    here = (rank, round_number, int(again))
    return tuple(fault for fault in faults if (fault.rank, fault.round, fault.again) == here)


def commit(fault: Injection) -> None:
    """Do it, on the calling thread; what a disk does, the dump's tap does."""
    match fault.action:
        case action if action in DISK_ACTIONS:
            pass
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "exit":
            os._exit(1)
        case "hang":
            threading.Event().wait()
        case "slow":
            time.sleep(fault.for_s)
        case "gil":
            _hold_the_gil(fault.for_s)
        case "async":
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(AsynchronousFault))
        case "cpu":
            for _ in range(_HOG_THREADS):
                threading.Thread(target=_hog_cpu, args=(fault.for_s,), name="ttp-chaos-cpu", daemon=True).start()
        case "memory":
            hog = threading.Thread(
                target=_hog_memory, args=(fault.mib, fault.for_s), name="ttp-chaos-memory", daemon=True
            )
            hog.start()
        case "segv":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        case "abort":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
        case _:
            raise InjectedFault(f"rank {fault.rank}, step {fault.step}: fault injected at {fault.point}")


def _hold_the_gil(for_s: float) -> None:
    """Sleep in C without letting go of Python's lock, for good if `for_s` is 0. Signals go to other threads: nothing wakes this one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    library = ctypes.PyDLL(None)
    end = time.monotonic() + (for_s or _FOR_GOOD_S)
    while (left_s := end - time.monotonic()) > 0:
        library.usleep(ctypes.c_uint(int(1e6 * min(left_s, 1000.0)) + 1))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hog_cpu(for_s: float) -> None:
    """Count, with Python's lock whenever it is this thread's turn."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        sum(range(10_000))


def _hog_memory(mib: int, for_s: float) -> None:
    """Fill so many MiB, keep them for so long, and give them back."""
    with mmap.mmap(-1, mib << 20) as room:
        for _ in range(mib):
            room.write(_CHUNK)
        time.sleep(for_s)
