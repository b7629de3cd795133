"""The newer names of MindIO, `tft_*`, that declare a job, its steps and its handlers.

Owns the translation into the older names' acts. What serves repair in place (UCE, ARF, hot switching, downgrade) is in
`ttp.mindio.repair`.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttp import persist
from ttp.config import Settings, enabled
from ttp.errors import ConfigError
from ttp.mindio.job import ReplicaGroups, current_job
from ttp.mindio.saving import save_handlers
from ttp.runtime.rank_runtime import show


class OptimizerType(enum.IntEnum):
    """Which parameters an optimizer updates; here one optimizer updates all, with a replica group for each kind."""

    ATTENTION = 0
    MOE = 1


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """As `ttp_init_controller`."""
    _note_repair(enable_arf, enable_zit)
    current_job().init_controller(rank, world_size, enable_local_copy)


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """As `ttp_start_controller`. enable_tls, tls_info: connections are TLS with ttprun's certificates or the site's; a warning where they are not."""
    _note_tls(enable_tls, tls_info)
    current_job().start_controller(bind_ip, port)


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """As `ttp_init_processor`. enable_uce, enable_arf, enable_zit: nothing is repaired in place; every fault ends in a dump."""
    _note_tls(enable_tls, tls_info)
    _note_repair(enable_arf, enable_zit)
    current_job().init_processor(rank, None, None, world_size, enable_local_copy)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """As `ttp_start_processor`; this node's name is TTP_HOST's or the host's own, not `local_ip`."""
    current_job().start_processor(master_ip, port)


def tft_destroy_controller() -> None:
    """Nothing to do: the controller ends when all ranks have left."""


def tft_destroy_processor() -> None:
    """End this rank's protection; the end of the process does it as well."""
    current_job().close()


def tft_start_updating_os(backup_step: int) -> None:
    """As `ttp_start_updating_os`."""
    current_job().start_updating(backup_step)


def tft_start_copy_os() -> None:
    """Nothing to do: the optimizer makes its local copy itself, within the update."""


def tft_end_updating_os(step: int) -> None:
    """As `ttp_end_updating_os`."""
    current_job().end_updating(step)


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> None:
    """Declare who holds copies; it is checked against the world, and computed from the optimizer all the same."""
    for entry in replica_info:
        tft_set_dp_group_info(rank, entry["rank_list"])


def tft_set_dp_group_info(rank: int, dp_rank_list: Sequence[int]) -> None:
    """Declare the data-parallel group of this rank. Raises ConfigError when this rank is not in it."""
    if rank not in dp_rank_list:
        raise ConfigError(f"rank {rank} is not in its data-parallel group {list(dp_rank_list)}")
    job = current_job()
    job.declare(ReplicaGroups(tuple(dp_rank_list), None if job.groups is None else job.groups.shard_group))


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Protect `func`, the function that holds the training loop (`ttp.ttp_to_persist`)."""

    @functools.wraps(func)
    def train(*args: Any, **kwargs: Any) -> Any:
        current_job().in_train = True
        try:
            return func(*args, **kwargs)
        finally:
            current_job().in_train = False
            current_job().step_args.close()

    return persist.ttp_to_persist(train)


def tft_set_step_args(args: Any) -> None:
    """As `ttp_set_ckpt_args`: once every iteration, after the schedule has stepped on."""
    current_job().step_done(args)


def tft_register_save_ckpt_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Register what saves at a fault: `func(step, save_info, args, ctx)`, save_info as `[{"type": 0, "ranks": rank_list}]`.

    With expert parallelism the experts' ranks (type 1) follow: those of the same model part.
    """
    job = current_job()

    def kinds() -> tuple[int, ...]:
        experts = job.optimizer is not None and job.optimizer.place.expert_size > 1
        return (OptimizerType.ATTENTION, OptimizerType.MOE) if experts else (OptimizerType.ATTENTION,)

    job.save_handler = save_handlers.newer_save_handler(func, kinds, ctx)


def tft_register_rename_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Register what publishes: `func(step, args)`, which raises when it cannot."""
    current_job().rename_handler = save_handlers.newer_rename_handler(func)


def tft_is_reboot_node() -> bool:
    """False: no process joins a job that goes on; after a fault all ranks start again."""
    return False


def tft_query_high_availability_switch() -> bool:
    """Say whether ENABLE_TTP allows it."""
    return enabled()


def _note_tls(enable_tls: bool, tls_info: str) -> None:
    job = current_job()
    if not enable_tls or job.tls_noted:
        return
    job.tls_noted = True
    settings = Settings.from_env()
    if not (settings.identity or settings.tls_files):
        show(
            logging.WARNING,
            "enable_tls=True, and the connection to the controller is plain: start the job with ttprun, without TTP_TLS=False",
        )
    elif tls_info and not settings.tls_files:
        show(
            logging.WARNING,
            "tls_info is not read: connections have certificates of the job's own. Name the site's in TTP_TLS_CERT, TTP_TLS_KEY and TTP_TLS_CA",
        )


def _note_repair(enable_arf: bool, enable_zit: bool) -> None:
    if asked := [name for name, value in (("enable_arf", enable_arf), ("enable_zit", enable_zit)) if value]:
        show(
            logging.WARNING,
            f"{' and '.join(asked)}=True: nothing is repaired in place; a fault ends in a dying-gasp checkpoint and a restart of all ranks",
        )
