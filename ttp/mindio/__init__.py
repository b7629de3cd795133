"""MindIO TTP's interface, `mindio_ttp.framework_ttp`, over this project's core.

A trainer that was patched for MindIO TTP replaces `mindio_ttp.framework_ttp` by `ttp.mindio` and `mindio_ttp.modellink` by
`ttp.mindio.modellink`: names, argument orders and handlers are the same. The order of the calls:

    build_optimizer_replica_group(ranks)                 every rank, for every data-parallel group (ttp.mindio.modellink)
    TTPReplicaOptimizer(...), or TTPOddReplicaOptimizer  every rank
    ttp_init_controller, ttp_start_controller            rank 0
    ttp_init_processor, ttp_start_processor              every rank
    ttp_register_save_ckpt_handler, ..._rename_handler   every rank
    ttp_set_ckpt_args                                    every rank, after every iteration
    train = ttp_to_persist(train)                        the function that holds the training loop

Handlers: `save(save_rank, step, rank_list, args)` runs on every rank of `rank_list` at a fault, after the ranks have agreed on `step`,
on a thread beside the training thread; `rename(args)` publishes and returns 0, or 1 when it could not. See docs/mindio.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ttp.errors import ConfigError
from ttp.mindio.job import DEFAULT_PORT, current_job
from ttp.mindio.newer import OptimizerType as OptimizerType
from ttp.mindio.newer import tft_destroy_controller as tft_destroy_controller
from ttp.mindio.newer import tft_destroy_processor as tft_destroy_processor
from ttp.mindio.newer import tft_end_updating_os as tft_end_updating_os
from ttp.mindio.newer import tft_exception_handler as tft_exception_handler
from ttp.mindio.newer import tft_exception_handler as ttp_to_persist
from ttp.mindio.newer import tft_init_controller as tft_init_controller
from ttp.mindio.newer import tft_init_processor as tft_init_processor
from ttp.mindio.newer import tft_is_reboot_node as tft_is_reboot_node
from ttp.mindio.newer import tft_query_high_availability_switch as tft_query_high_availability_switch
from ttp.mindio.newer import tft_register_rename_handler as tft_register_rename_handler
from ttp.mindio.newer import tft_register_save_ckpt_handler as tft_register_save_ckpt_handler
from ttp.mindio.newer import tft_set_dp_group_info as tft_set_dp_group_info
from ttp.mindio.newer import tft_set_optimizer_replica as tft_set_optimizer_replica
from ttp.mindio.newer import tft_set_step_args as tft_set_step_args
from ttp.mindio.newer import tft_start_controller as tft_start_controller
from ttp.mindio.newer import tft_start_copy_os as tft_start_copy_os
from ttp.mindio.newer import tft_start_processor as tft_start_processor
from ttp.mindio.newer import tft_start_updating_os as tft_start_updating_os
from ttp.mindio.repair import Action as Action
from ttp.mindio.repair import RepairType as RepairType
from ttp.mindio.repair import ReportState as ReportState
from ttp.mindio.repair import tft_can_do_uce_repair as tft_can_do_uce_repair
from ttp.mindio.repair import tft_get_reboot_type as tft_get_reboot_type
from ttp.mindio.repair import tft_get_repair_step as tft_get_repair_step
from ttp.mindio.repair import tft_get_repair_type as tft_get_repair_type
from ttp.mindio.repair import tft_notify_controller_change_strategy as tft_notify_controller_change_strategy
from ttp.mindio.repair import tft_notify_controller_dump as tft_notify_controller_dump
from ttp.mindio.repair import tft_notify_controller_on_global_rank as tft_notify_controller_on_global_rank
from ttp.mindio.repair import tft_notify_controller_prepare_action as tft_notify_controller_prepare_action
from ttp.mindio.repair import tft_notify_controller_stop_train as tft_notify_controller_stop_train
from ttp.mindio.repair import tft_pause_train as tft_pause_train
from ttp.mindio.repair import tft_register_clean_handler as tft_register_clean_handler
from ttp.mindio.repair import tft_register_decrypt_handler as tft_register_decrypt_handler
from ttp.mindio.repair import tft_register_exception_handler as tft_register_exception_handler
from ttp.mindio.repair import tft_register_exit_handler as tft_register_exit_handler
from ttp.mindio.repair import tft_register_mindx_callback as tft_register_mindx_callback
from ttp.mindio.repair import tft_register_rebuild_group_handler as tft_register_rebuild_group_handler
from ttp.mindio.repair import tft_register_repair_handler as tft_register_repair_handler
from ttp.mindio.repair import tft_register_rollback_handler as tft_register_rollback_handler
from ttp.mindio.repair import tft_register_stop_handler as tft_register_stop_handler
from ttp.mindio.repair import tft_register_stream_sync_handler as tft_register_stream_sync_handler
from ttp.mindio.repair import tft_register_zit_downgrade_rebuild_handler as tft_register_zit_downgrade_rebuild_handler
from ttp.mindio.repair import tft_register_zit_upgrade_rebuild_handler as tft_register_zit_upgrade_rebuild_handler
from ttp.mindio.repair import tft_register_zit_upgrade_repair_handler as tft_register_zit_upgrade_repair_handler
from ttp.mindio.repair import tft_register_zit_upgrade_rollback_handler as tft_register_zit_upgrade_rollback_handler
from ttp.mindio.repair import tft_report_error as tft_report_error
from ttp.mindio.repair import tft_report_load_ckpt_step as tft_report_load_ckpt_step
from ttp.mindio.repair import tft_reset_limit_step as tft_reset_limit_step
from ttp.mindio.repair import tft_set_update_end_time as tft_set_update_end_time
from ttp.mindio.repair import tft_set_update_start_time as tft_set_update_start_time
from ttp.mindio.repair import tft_wait_next_action as tft_wait_next_action
from ttp.mindio.saving import save_handlers

__all__ = [
    "Action",
    "OptimizerType",
    "RepairType",
    "ReportState",
    "tft_can_do_uce_repair",
    "tft_destroy_controller",
    "tft_destroy_processor",
    "tft_end_updating_os",
    "tft_exception_handler",
    "tft_get_reboot_type",
    "tft_get_repair_step",
    "tft_get_repair_type",
    "tft_init_controller",
    "tft_init_processor",
    "tft_is_reboot_node",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_pause_train",
    "tft_query_high_availability_switch",
    "tft_register_clean_handler",
    "tft_register_decrypt_handler",
    "tft_register_exception_handler",
    "tft_register_exit_handler",
    "tft_register_mindx_callback",
    "tft_register_rebuild_group_handler",
    "tft_register_rename_handler",
    "tft_register_repair_handler",
    "tft_register_rollback_handler",
    "tft_register_save_ckpt_handler",
    "tft_register_stop_handler",
    "tft_register_stream_sync_handler",
    "tft_register_zit_downgrade_rebuild_handler",
    "tft_register_zit_upgrade_rebuild_handler",
    "tft_register_zit_upgrade_repair_handler",
    "tft_register_zit_upgrade_rollback_handler",
    "tft_report_error",
    "tft_report_load_ckpt_step",
    "tft_reset_limit_step",
    "tft_set_dp_group_info",
    "tft_set_optimizer_replica",
    "tft_set_step_args",
    "tft_set_update_end_time",
    "tft_set_update_start_time",
    "tft_start_controller",
    "tft_start_copy_os",
    "tft_start_processor",
    "tft_start_updating_os",
    "tft_wait_next_action",
    "ttp_end_updating_os",
    "ttp_init_controller",
    "ttp_init_processor",
    "ttp_register_rename_handler",
    "ttp_register_save_ckpt_handler",
    "ttp_set_ckpt_args",
    "ttp_start_controller",
    "ttp_start_processor",
    "ttp_start_updating_os",
    "ttp_to_persist",
]


def ttp_init_controller(rank: int, world_size: int, replica: int = 2, enable_local_copy: bool = False) -> None:
    """Declare the controller (rank 0). `replica` is not needed: who holds what is computed from the optimizer."""
    _check_replica(replica)
    current_job().init_controller(rank, world_size, enable_local_copy)


def ttp_start_controller(ip: str, port: int = DEFAULT_PORT) -> None:
    """Say where the controller listens (rank 0). TTP_CONTROLLER_PORT goes before `port`."""
    current_job().start_controller(ip, port)


def ttp_init_processor(
    rank: int,
    dp_ranks: Sequence[int],
    dp_size: int,
    world_size: int,
    replica: int = 2,
    enable_local_copy: bool = False,
) -> None:
    """Declare this rank (every rank). Raises ConfigError for what contradicts torch.distributed or the optimizer."""
    _check_replica(replica)
    current_job().init_processor(rank, dp_ranks, dp_size, world_size, enable_local_copy)


def ttp_start_processor(ip: str, port: int = DEFAULT_PORT) -> None:
    """Protect this rank from here on (every rank calls). Raises ConfigError, ControllerError, NotWritable."""
    current_job().start_processor(ip, port)


def ttp_register_save_ckpt_handler(handler: Callable[[int, int, list[int], Any], object]) -> None:
    """Register what saves at a fault: `handler(save_rank, step, rank_list, args)`, args being what `ttp_set_ckpt_args` was given."""
    current_job().save_handler = save_handlers.save_handler(handler)


def ttp_register_rename_handler(handler: Callable[[Any], int | None]) -> None:
    """Register what publishes: `handler(args)` returns 0 (or nothing) when the checkpoint is visible, 1 when it could not be made so."""
    current_job().rename_handler = save_handlers.rename_handler(handler)


def ttp_set_ckpt_args(args: Any) -> None:
    """Say what the handlers are to be given, once an iteration is finished: `(iteration, model, optimizer, lr_scheduler)`."""
    current_job().step_done(args)


def ttp_start_updating_os(backup_step: int) -> None:
    """The optimizer's state is about to change; the optimizer's `begin_to_update` calls it. backup_step: of the local copy, -1: none."""
    current_job().start_updating(backup_step)


def ttp_end_updating_os(step: int) -> None:
    """The optimizer's state is that of `step`; the optimizer's `end_to_update` calls it."""
    current_job().end_updating(step)


def _check_replica(replica: int) -> None:
    if type(replica) is not int or replica < 0:  # half of a lone rank is 0
        raise ConfigError(f"replica: got {replica!r}, expected a number from 0")
