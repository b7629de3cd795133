"""The newer names of MindIO, `tft_*`: those that mean what this project does, and an error for each of the others.

Owns the lists. MindIO's later versions also repair a job in place (UCE, ARF, hot switching, downgrade): here a fault ends in a
dying-gasp checkpoint and a restart, so what serves repair has no counterpart.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ttp import persist
from ttp.config import enabled
from ttp.errors import ConfigError, NotSupported
from ttp.mindio import handlers
from ttp.mindio.job import ReplicaGroups, current_job


class OptimizerType(enum.IntEnum):
    """Which parameters an optimizer updates; here one optimizer updates all."""

    ATTENTION = 0
    MOE = 1


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """As `ttp_init_controller`."""
    _refuse_repair(enable_arf, enable_zit)
    current_job().init_controller(rank, world_size, enable_local_copy)


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """As `ttp_start_controller`; there is no encryption, which has to be said: `enable_tls=False`."""
    _refuse_tls(enable_tls)
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
    """As `ttp_init_processor`. enable_uce: memory errors are not repaired in place; they are faults like any other."""
    _refuse_tls(enable_tls)
    _refuse_repair(enable_arf, enable_zit)
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
    """Register what saves at a fault: `func(step, save_info, args, ctx)`, save_info as `[{"type": 0, "ranks": rank_list}]`."""
    current_job().save_handler = handlers.newer_save_handler(func, int(OptimizerType.ATTENTION), ctx)


def tft_register_rename_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Register what publishes: `func(step, args)`, which raises when it cannot."""
    current_job().rename_handler = handlers.newer_rename_handler(func)


def tft_is_reboot_node() -> bool:
    """False: no process joins a job that goes on; after a fault all ranks start again."""
    return False


def tft_query_high_availability_switch() -> bool:
    """Say whether ENABLE_TTP allows it."""
    return enabled()


_RESTART = (
    "after a fault all ranks leave and ttprun starts them again from the dying-gasp checkpoint: leave the call out"
)
_EXCEPTION = "any exception out of the decorated train function is a fault: leave the call out"
_NOTICE = "send SIGTERM to ttprun or to a rank: the step in flight is finished and saved"

UNSUPPORTED = {
    "tft_register_exit_handler": "a rank leaves by itself; use atexit, or the end of the decorated function",
    "tft_register_stop_handler": _RESTART,
    "tft_register_clean_handler": _RESTART,
    "tft_register_rebuild_group_handler": _RESTART,
    "tft_register_repair_handler": _RESTART,
    "tft_register_rollback_handler": _RESTART,
    "tft_register_stream_sync_handler": _RESTART,
    "tft_register_zit_upgrade_rollback_handler": _RESTART,
    "tft_register_zit_upgrade_repair_handler": _RESTART,
    "tft_register_zit_upgrade_rebuild_handler": _RESTART,
    "tft_register_zit_downgrade_rebuild_handler": _RESTART,
    "tft_register_exception_handler": _EXCEPTION,
    "tft_report_error": _EXCEPTION,
    "tft_wait_next_action": _RESTART,
    "tft_get_repair_step": _RESTART,
    "tft_get_repair_type": _RESTART,
    "tft_get_reboot_type": _RESTART,
    "tft_reset_limit_step": _RESTART,
    "tft_report_load_ckpt_step": "set optimizer.current_step to the loaded iteration, before ttp_start_processor",
    "tft_register_decrypt_handler": "messages are not encrypted: keep the controller's port inside the job's network",
    "tft_notify_controller_dump": _NOTICE,
    "tft_notify_controller_stop_train": _NOTICE,
    "tft_notify_controller_on_global_rank": "ttprun and the ranks report who died: leave the call out",
    "tft_notify_controller_prepare_action": _RESTART,
    "tft_notify_controller_change_strategy": _RESTART,
    "tft_register_mindx_callback": "read the controller's journal (docs/ttprun.md)",
    "tft_can_do_uce_repair": _RESTART,
    "tft_set_update_start_time": _RESTART,
    "tft_set_update_end_time": _RESTART,
    "tft_pause_train": _NOTICE,
}
"""Names that raise NotSupported when they are called, and what to do instead."""


class UnsupportedEnumeration:
    """An enumeration of MindIO's without a counterpart: it can be imported, and asking for a member raises NotSupported."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, member: str) -> NoReturn:
        if member.startswith("__"):  # asked for by Python itself
            raise AttributeError(member)
        raise NotSupported(f"{self.__name__}.{member} is not supported by ttp.mindio: {_RESTART}")


Action = UnsupportedEnumeration("Action")
RepairType = UnsupportedEnumeration("RepairType")
ReportState = UnsupportedEnumeration("ReportState")


def refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotSupported."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotSupported(f"{name} is not supported by ttp.mindio: {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotSupported: {instead}."
    return refuse


def _refuse_tls(enable_tls: bool) -> None:
    if enable_tls:
        raise NotSupported(
            "enable_tls=True (MindIO's default) is not supported by ttp.mindio: messages are not encrypted; pass enable_tls=False"
            " and keep the controller's port inside the job's network"
        )


def _refuse_repair(enable_arf: bool, enable_zit: bool) -> None:
    if enable_arf or enable_zit:
        raise NotSupported(f"enable_arf and enable_zit are not supported by ttp.mindio: {_RESTART}; pass False")
