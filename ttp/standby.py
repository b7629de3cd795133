"""Standby controllers: which rank starts one, under which term, and how.

The controller that rank 0 starts is the first of a start of the job; standbys wait in processes of their own, on other nodes
where there are some, and take over in the order of their places. Owns their start only. A standby that cannot be started
costs protection, never the job.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ttp.config import Settings
from ttp.controller.process import ControllerProcess, start_controller
from ttp.errors import ControllerError, NotWritable

log = logging.getLogger("ttp")

MOST_STANDBYS = 9
"""What TTP_STANDBYS may be at most."""

TERMS_OF_A_START = 100
"""More than there are controllers in one start of the job: every later start has higher terms than all before."""


def term_of(round_number: int, place: int = 0) -> int:
    """Return the term of a start's controller: place 0 is the first, i the i-th standby. From 1 on, rising."""
    return round_number * TERMS_OF_A_START + 1 + place


def controller_options(settings: Settings) -> tuple[str, ...]:
    """Return the arguments that every controller of the job is started with."""
    local = () if settings.shared_dirs else ("--local-dirs",)
    return ("--vouched-lease-s", str(settings.vouched_lease_s), *hang_options(settings), *local)


def standby_key(round_number: int, place: int) -> str:
    """Return the store's key for a standby; value: `host:port`. The launchers look there: they know of it even when the
    first controller dies before they reached it."""
    return f"ttp/standby/{round_number}/{place}"


def standby_place(settings: Settings, rank: int, world_size: int) -> int:
    """Return which standby this rank has to start, 0: none.

    The first rank of each further node starts one, up to `settings.standbys`; on a single node rank 1 does, so that at
    least the death of a process is survived.
    """
    if world_size == 1 or settings.standbys == 0:
        return 0
    if settings.one_node:
        return 1 if rank == 1 else 0
    return settings.node_rank if settings.local_rank == 0 and 1 <= settings.node_rank <= settings.standbys else 0


def hang_options(settings: Settings) -> tuple[str, ...]:
    """Return what every controller of the job is told of hangs, as arguments of its program."""
    return (
        *("--hang-floor-s", str(settings.hang_floor_s), "--hang-early-floor-s", str(settings.hang_early_floor_s)),
        *("--hang-start-s", str(settings.hang_start_s), "--hang-factor", str(settings.hang_factor)),
    )


def start_standby(settings: Settings, place: int, world_size: int, log_dir: Path) -> ControllerProcess | None:
    """Start this job's standby of a place; None, with a warning, when that fails."""
    port = settings.controller_port + place if settings.controller_port else 0
    try:
        return start_controller(
            bind="127.0.0.1" if settings.one_node else "0.0.0.0",
            advertise="127.0.0.1" if settings.one_node else settings.host,
            port=port if port < 65536 else 0,
            job_id=settings.start_name,
            term=term_of(settings.round_number, place),
            world_size=world_size,
            journal=log_dir / f"standby_{settings.round_number}_{place}.jsonl",
            heartbeat_s=settings.heartbeat_s,
            lease_s=settings.lease_s,
            total_timeout_s=settings.total_timeout_s,
            standby=place,
            options=controller_options(settings),
            guardians=(os.getpid(), os.getppid()) if settings.launched else (os.getpid(),),
        )
    except (ControllerError, NotWritable) as error:
        log.warning("standby controller %d could not be started; the job does without it: %s", place, error)
        return None
