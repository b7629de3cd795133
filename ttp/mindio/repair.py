"""The names of MindIO that serve repair in place and its cluster manager (MindCluster), as they answer where neither is there.

Owns those answers. A fault here always ends in a dying-gasp checkpoint (`dump`) and a restart: handlers of repair are taken and
never called, what asks for a repair is answered with failure, and a dump that is asked for is made.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ttp.errors import ConfigError
from ttp.mindio.job import current_job
from ttp.runtime.rank_runtime import show

OK, FAILED = 0, 1


class Action(enum.Enum):
    """What the training thread does after it has reported an error."""

    RETRY = 0
    EXIT = 1


class ReportState(enum.Enum):
    """What a rank reports of its training."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_UNKNOWN = 5
    RS_INIT_FINISH = 6
    RS_PREREPAIR_FINISH = 7
    RS_STEP_FINISH = 8


class RepairType(enum.Enum):
    """How a rank takes part in a repair in place; no rank does here."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_ROLLBACK = 3
    RT_RECV_REPAIR = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


_NO_FAULT = (
    ReportState.RS_NORMAL,
    ReportState.RS_INIT_FINISH,
    ReportState.RS_PREREPAIR_FINISH,
    ReportState.RS_STEP_FINISH,
)
_MINDX_ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
_STRATEGIES = ("retry", "downgrade", "upgrade", "recover", "dump", "continue", "migration", "exit")


def _check_handler(name: str, func: object) -> None:
    if not callable(func):
        raise ConfigError(f"invalid handler of {name}: got {func!r}, expected a function")


def tft_register_exit_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: MindIO calls it for MindSpore alone."""
    _check_handler("tft_register_exit_handler", func)


def tft_register_stop_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: a rank is stopped at the optimizer's gate."""
    _check_handler("tft_register_stop_handler", func)


def tft_register_clean_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: nothing is repaired in place."""
    _check_handler("tft_register_clean_handler", func)


def tft_register_rebuild_group_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: all ranks start again."""
    _check_handler("tft_register_rebuild_group_handler", func)


def tft_register_repair_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: nothing is repaired in place."""
    _check_handler("tft_register_repair_handler", func)


def tft_register_rollback_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: a restarted rank loads its checkpoint."""
    _check_handler("tft_register_rollback_handler", func)


def tft_register_stream_sync_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: training is not paused."""
    _check_handler("tft_register_stream_sync_handler", func)


def tft_register_zit_upgrade_rollback_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """Take the handler, which is never called: the number of ranks does not change while a job runs."""
    _check_handler("tft_register_zit_upgrade_rollback_handler", func)


def tft_register_zit_upgrade_repair_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """As `tft_register_zit_upgrade_rollback_handler`."""
    _check_handler("tft_register_zit_upgrade_repair_handler", func)


def tft_register_zit_upgrade_rebuild_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """As `tft_register_zit_upgrade_rollback_handler`."""
    _check_handler("tft_register_zit_upgrade_rebuild_handler", func)


def tft_register_zit_downgrade_rebuild_handler(func: Callable[..., object], ctx: Any = None) -> None:
    """As `tft_register_zit_upgrade_rollback_handler`."""
    _check_handler("tft_register_zit_downgrade_rebuild_handler", func)


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """Check the arguments; any exception out of the decorated function is a fault that ends in a dump, whatever its type."""
    _check_handler("tft_register_exception_handler", fault_handle)
    if fault_type not in ReportState.__members__:
        raise ConfigError(
            f"invalid fault_type: got {fault_type!r}, expected one of {', '.join(ReportState.__members__)}"
        )


def tft_register_decrypt_handler(decryptor: Callable[[str], str]) -> None:
    """Take the function for the private key's password; it is not called: no key of TTP's has one."""
    _check_handler("tft_register_decrypt_handler", decryptor)


def tft_report_error(error_type: ReportState | int) -> None:
    """Report a fault of this rank, which ends in a dump; a state that is not a fault is ignored. Raises ConfigError."""
    try:
        state = ReportState(error_type)
    except ValueError:
        raise ConfigError(f"invalid error_type: got {error_type!r}, expected a ReportState") from None
    if state not in _NO_FAULT:
        current_job().report_fault(f"the trainer reported {state.name}")


def tft_wait_next_action() -> int:
    """Wait until the fault's checkpoint is saved; return 1 (Action.EXIT): this process is to exit, and ttprun starts it again."""
    current_job().hold()
    return Action.EXIT.value


def tft_get_repair_step() -> int:
    """Return 0: no step is being repaired."""
    return 0


def tft_get_repair_type() -> str:
    """Return `dump` while this rank is frozen by a fault, else `unknown`."""
    return "dump" if current_job().frozen else "unknown"


def tft_get_reboot_type() -> str:
    """Return `unknown`: no process joins a job that goes on (`tft_is_reboot_node` is False)."""
    return "unknown"


def tft_reset_limit_step() -> None:
    """Nothing to do: no step is limited."""


def tft_report_load_ckpt_step(step: int) -> None:
    """Note that the state is that of the loaded checkpoint's `step`, as setting `optimizer.current_step` does."""
    if type(step) is not int or step < 0:
        raise ConfigError(f"invalid step: got {step!r}, expected an integer >= 0")
    if (optimizer := current_job().optimizer) is not None:
        optimizer.current_step = step


def tft_notify_controller_dump() -> int:
    """Have all ranks finish the step in flight, save it and exit, as SIGTERM does. Return 0, or 1 where nothing is protected."""
    return OK if current_job().preempt("tft_notify_controller_dump") else FAILED


def tft_notify_controller_stop_train(
    fault_ranks: Mapping[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Return 1: training is not stopped for a repair."""
    return _not_done("tft_notify_controller_stop_train", "training is not stopped for a repair in place")


def tft_notify_controller_on_global_rank(fault_ranks: Mapping[int, int], time: int = 1) -> int:
    """Return 0: the controller knows of lost ranks by ttprun and by their leases."""
    return OK


def tft_notify_controller_prepare_action(action: str, fault_ranks: Mapping[int, int] | None = None) -> int:
    """Return 1: there is no hot switching."""
    return _not_done("tft_notify_controller_prepare_action", f"{action!r} is not available")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Do what `dump` means; `continue` has nothing to do; return 1 for any other."""
    if strategy not in _STRATEGIES:
        raise ConfigError(f"invalid strategy: got {strategy!r}, expected one of {', '.join(_STRATEGIES)}")
    if strategy == "dump":
        return tft_notify_controller_dump()
    if strategy == "continue":
        return OK
    return _not_done("tft_notify_controller_change_strategy", f"{strategy!r} is not available")


def tft_register_mindx_callback(action: str, func: Callable[..., object]) -> int:
    """Return 1: no cluster manager is called; the controller's journal has what it would receive."""
    _check_handler("tft_register_mindx_callback", func)
    if action not in _MINDX_ACTIONS:
        raise ConfigError(f"invalid action: got {action!r}, expected one of {', '.join(_MINDX_ACTIONS)}")
    return _not_done("tft_register_mindx_callback", "the function is not called; read the controller's journal")


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Return False: a memory error is a fault like any other."""
    return False


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Nothing to do: the time serves `tft_can_do_uce_repair`."""


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Nothing to do: the time serves `tft_can_do_uce_repair`."""


def tft_pause_train(cur_step: int) -> None:
    """Nothing to do: training pauses at a step only where a cluster manager has asked for it."""


def _not_done(name: str, reason: str) -> int:
    show(logging.WARNING, f"{name} returned 1: {reason}. A fault ends in a dying-gasp checkpoint and a restart")
    return FAILED
