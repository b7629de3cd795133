"""Standby controllers: which rank starts one, under which term, and how ranks and agents find it.

The controller that rank 0 starts is the first of an attempt of the job; standbys wait in processes of their own, on other nodes where there
are some, and take over in the order of their places. One that is lost is replaced by another of a higher place. Owns their start, the
list of them in the attempt's store, and the watch over those of this rank. A standby that cannot be started costs protection, never
the job.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.config import Settings
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import ControllerProcess, start_controller
from ttp.errors import ControllerError, NotWritable

log = logging.getLogger("ttp")

MOST_STANDBYS = 9
"""What TTP_STANDBYS may be at most; those that replace a lost one have higher places."""

TERMS_OF_AN_ATTEMPT = 10_000
"""More than there are controllers in one attempt of the job: every later attempt has higher terms than all before."""

END_S = 10.0
"""How long a standby that is not needed any more may take to end."""


def term_of(round_number: int, place: int = 0) -> int:
    """Return the term of an attempt's controller: place 0 is the first, i the i-th standby. From 1 on, rising."""
    return round_number * TERMS_OF_AN_ATTEMPT + 1 + place


def last_term_of(round_number: int) -> int:
    """Return the highest term of an attempt, which none of its controllers has: of what the ranks save when they obey none any more."""
    return term_of(round_number, TERMS_OF_AN_ATTEMPT - 1)


def standbys_of(settings: Settings, world_size: int) -> int:
    """Return how many standbys the job keeps behind its active controller: one on a single node, else one on each further node up to
    TTP_STANDBYS."""
    if world_size == 1 or (settings.node_rank < 0 and not settings.one_node):
        return 0
    return min(settings.standbys, 1 if settings.one_node else settings.nodes - 1)


def controller_settings(settings: Settings, place: int, world_size: int) -> ControllerSettings:
    """Return what this job's controller of a place is started with."""
    return ControllerSettings(
        job_id=settings.start_name,
        term=term_of(settings.round_number, place),
        world_size=world_size,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        vouched_lease_s=settings.vouched_lease_s,
        total_timeout_s=settings.total_timeout_s,
        freeze_timeout_s=settings.answer_s,
        orphan_timeout_s=settings.lost_s,
        hang=settings.hang,
        standby=place,
        standbys=standbys_of(settings, world_size),
        local_dirs=not settings.shared_dirs,
        in_place_s=0.0 if settings.in_place == "off" else settings.in_place_s,
        most_in_place=settings.most_in_place,
        publish_first=settings.gasp == "always",
    )


def standby_place(settings: Settings, rank: int, world_size: int) -> int:
    """Return which standby this rank has to start at the beginning, 0: none.

    The first rank of each further node starts one, up to `settings.standbys`; on a single node rank 1 does, so that at
    least the death of a process is survived.
    """
    if world_size == 1 or settings.standbys == 0:
        return 0
    if settings.one_node:
        return 1 if rank == 1 else 0
    return settings.node_rank if settings.local_rank == 0 and 1 <= settings.node_rank <= settings.standbys else 0


# --- the list in the store ---


def standbys_key(round_number: int) -> str:
    """Return the store's key for the standbys of an attempt; a line `place address` each, in the order in which they were started. Agents
    look there, and ranks that have lost every controller that they know."""
    return f"ttp/standbys/{round_number}"


def enter(store: Store, round_number: int, place: int, address: str) -> None:
    """Add a standby to the list."""
    store.append(standbys_key(round_number), f"{place} {address}\n")  # type: ignore[attr-defined]


def listed(store: Store, round_number: int) -> tuple[str, ...]:
    """Return the addresses of all standbys of an attempt, in the order of their places."""
    return tuple(address for _, address in _entered(store, round_number))


def _entered(store: Store, round_number: int) -> list[tuple[int, str]]:
    """Return places and addresses, the lowest place first."""
    key = standbys_key(round_number)
    if not store.check([key]):
        return []
    lines = [line.split() for line in store.get(key).decode().splitlines()]
    return sorted((int(line[0]), line[1]) for line in lines if len(line) == 2 and line[0].isdecimal())


def _next_place(store: Store, round_number: int) -> int:
    """Return the place of one that replaces a lost one: above all before. The count has no seal, the list has: a count that was set back
    gives no place twice, and one that was set forward costs standbys."""
    count = f"{standbys_key(round_number)}/count"
    place = MOST_STANDBYS + store.add(count, 1)
    highest = max((entered for entered, _ in _entered(store, round_number)), default=0)
    return place if place > highest else MOST_STANDBYS + store.add(count, highest + 1 - place)


def start_job_controller(settings: Settings, place: int, world_size: int, log_dir: Path) -> ControllerProcess:
    """Start this job's controller of a place: 0 is the first, i the i-th standby. Raises ControllerError, NotWritable."""
    port = settings.controller_port + place if settings.controller_port else 0
    number = settings.round_number
    return start_controller(
        controller_settings(settings, place, world_size),
        log_dir / (f"standby_{number}_{place}.jsonl" if place else f"journal_{number}.jsonl"),
        bind="127.0.0.1" if settings.one_node else "0.0.0.0",
        advertise="127.0.0.1" if settings.one_node else settings.host,
        port=port if port < 65536 else 0,
        fork_server=settings.fork_server,
        guardians=(os.getpid(), os.getppid()) if place and settings.launched else (os.getpid(),),
    )


class Standbys:
    """The standbys that one rank starts (a `ttp.processor.ports.ControllerStarter`). The processor's thread calls `start` and `look`."""

    def __init__(self, settings: Settings, world_size: int, log_dir: Path, open_store: Callable[[], Store]) -> None:
        """`open_store()`: a client of the store that the ranks of this attempt met in; made when it is first needed."""
        self._settings = settings
        self._world_size = world_size
        self._log_dir = log_dir
        self._open_store = open_store
        self._store: Store | None = None
        self._lock = threading.Lock()  # guards the three below
        self._dismissed = False
        self.running: list[ControllerProcess] = []
        """Those that were started here and not dismissed; some may have ended."""
        self._ended: Callable[[str], None] = lambda address: None

    def first(self, place: int, store: Store) -> str:
        """Start the standby that the job begins with; return its address, empty, with a warning, when that fails."""
        try:
            process = start_job_controller(self._settings, place, self._world_size, self._log_dir)
            self._watch(process)
        except (ControllerError, NotWritable) as error:
            log.warning("standby controller %d could not be started; the job does without it: %s", place, error)
            return ""
        enter(store, self._settings.round_number, place, process.address)
        return process.address

    def start(self, known: tuple[str, ...]) -> str:
        """Start one of a place above all others; see ControllerStarter. Raises ControllerError, RuntimeError (of the store)."""
        settings, store = self._settings, self._client()
        place = _next_place(store, settings.round_number)
        if place >= TERMS_OF_AN_ATTEMPT - 1:
            raise ControllerError(f"{place} controllers were started in this attempt, expected fewer: restart the job")
        process = start_job_controller(settings, place, self._world_size, self._log_dir)
        others = [address for address in self.look() if address not in known] if known else []
        if others:
            self._end(process)
            raise ControllerError(f"other ranks have started {', '.join(others)} meanwhile")
        self._watch(process)
        enter(store, settings.round_number, place, process.address)
        return process.address

    def look(self) -> tuple[str, ...]:
        return listed(self._client(), self._settings.round_number)

    def on_end(self, ended: Callable[[str], None]) -> None:
        with self._lock:
            self._ended = ended
            gone = [process.address for process in self.running if process.process.poll() is not None]
        for address in gone:
            ended(address)

    def dismiss(self) -> None:
        """Have those end that no rank has come to, and wait for it a little; one that is being started ends when it has been."""
        with self._lock:
            self._dismissed = True
            running, self.running = self.running, []
            self._ended = lambda address: None
        for process in running:
            process.dismiss()
        for process in running:
            process.wait(END_S)

    def _end(self, process: ControllerProcess) -> None:
        process.dismiss()
        process.wait(END_S)

    def _watch(self, process: ControllerProcess) -> None:
        """Raises ControllerError: all were dismissed while this one was started; it has been signalled to end."""
        with self._lock:
            dismissed = self._dismissed
            if not dismissed:
                self.running.append(process)
        if dismissed:
            self._end(process)
            raise ControllerError(
                f"the standby at {process.address} came up when none was needed any more: it was ended"
            )
        threading.Thread(target=self._wait, args=(process,), name="ttp-standby", daemon=True).start()

    def _wait(self, process: ControllerProcess) -> None:
        process.process.wait()
        with self._lock:
            ended = self._ended
        ended(process.address)

    def _client(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store
