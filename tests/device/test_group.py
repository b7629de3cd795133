"""The device's process group, by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import claims_group as claims
from tests.device.ranks import run

ABORTED = -6


@pytest.mark.parametrize("world", [2, 3])
def test_collectives(world: int, tmp_path: Path) -> None:
    """On two ranks and three."""
    run(claims.collectives_carry_what_gloo_does, world, tmp_path)


def test_works_complete_on_their_stream(tmp_path: Path) -> None:
    """A launched collective is not a finished one."""
    run(claims.works_complete_on_their_stream, 2, tmp_path)


def test_abort_leaves_garbage(tmp_path: Path) -> None:
    """And does not raise."""
    run(claims.abort_leaves_garbage_and_does_not_raise, 2, tmp_path)


def test_death_of_a_peer_is_noticed_by_the_watchdog_alone(tmp_path: Path) -> None:
    """Under the settings that ttprun makes the survivor lives."""
    run(claims.peer_that_dies_is_noticed_by_the_watchdog_alone, 2, tmp_path, endings={1: 7})


def test_blind_watchdog_notices_nothing(tmp_path: Path) -> None:
    """Garbage looks like a result then."""
    run(claims.blind_watchdog_notices_nothing, 2, tmp_path, endings={1: 7})


@pytest.mark.parametrize("handling", ["0", "2"])
def test_timeout_shows(handling: str, tmp_path: Path) -> None:
    """With 2 the communicator is aborted as well."""
    run(claims.timeout_shows, 2, tmp_path, environ={"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling})


def test_watchdog_of_torchs_own_settings_ends_a_survivor(tmp_path: Path) -> None:
    """Why ttprun sets them: 3 is torch's own value."""
    settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    run(claims.waits_to_be_ended, 2, tmp_path, endings={0: ABORTED, 1: 7}, environ=settings)


@pytest.mark.parametrize("rethrows", ["0", "1"])
def test_watchdog_rethrows_an_error_of_the_device(rethrows: str, tmp_path: Path) -> None:
    """Or leaves it to ttp."""
    endings = {rank: 0 if rethrows == "0" else ABORTED for rank in range(2)}
    run(
        claims.fails_and_waits_to_be_ended, 2, tmp_path, endings=endings,
        environ={"TORCH_NCCL_RETHROW_CUDA_ERRORS": rethrows},
    )  # fmt: skip


@pytest.mark.parametrize("monitored", ["0", "1"])
def test_monitor_ends_a_process_whose_watchdog_is_stuck(monitored: str, tmp_path: Path) -> None:
    """Or leaves it to ttp."""
    endings = {rank: 0 if monitored == "0" else ABORTED for rank in range(2)}
    settings = {"TORCH_NCCL_ENABLE_MONITORING": monitored, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1"}
    run(claims.stuck_watchdog, 2, tmp_path, endings=endings, environ=settings)
