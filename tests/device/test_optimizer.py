"""ttp's optimizers and the dump on the device, by themselves."""

from __future__ import annotations

from pathlib import Path

from tests.device import claims_optimizer as claims
from tests.device.ranks import run


def test_a_step_waits_for_the_device_twice(tmp_path: Path) -> None:
    """Each wait more costs the device the time between two launches."""
    run(claims.step_waits_twice, 2, tmp_path)


def test_a_dump_asks_nothing_of_the_device_but_copies(tmp_path: Path) -> None:
    """A driver may have all else wait for the whole device, which never becomes idle."""
    run(claims.dump_asks_nothing_of_the_device_but_copies, 1, tmp_path)


def test_the_first_roll_forward_asks_nothing_of_the_device(tmp_path: Path) -> None:
    """What hangs there may hold everything that loads a kernel or asks the driver for memory."""
    run(claims.first_roll_forward_asks_nothing_of_the_device, 2, tmp_path)


def test_handlers_of_mindio_run_beside_a_kernel_that_hangs(tmp_path: Path) -> None:
    """Else no rank could save: the training thread's stream waits for the dead peer on each."""
    run(claims.handlers_of_mindio_run_beside_a_kernel_that_hangs, 1, tmp_path)


def test_offloaded_parameters_are_protected_on_their_device(tmp_path: Path) -> None:
    """They are on the CPU, and forward passes and collectives on the device."""
    run(claims.offloaded_parameters_are_protected_on_their_device, 2, tmp_path)
