"""Fault descriptions are parsed strictly and hit only the rank, step, point and start that they name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ttp.chaos.inject import Fault, InjectedFault, injector, parse_faults
from ttp.errors import ConfigError


def test_faults_are_parsed() -> None:
    """Several faults, with and without a round."""
    text = "kill:rank=2,step=7,point=updating; raise:rank=0,step=3,point=ready,round=1"
    assert parse_faults(text) == (Fault("kill", 2, 7, "updating"), Fault("raise", 0, 3, "ready", 1))
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:rank=1",
        "burn:rank=1,step=2,point=ready",
        "kill:rank=x,step=2,point=ready",
        "kill:rank=1,step=2,point=lunch",
        "kill:rank=1,rank=2,step=2,point=ready",
        "kill:rank=1,step=2,point=ready,colour=red",
    ],
)
def test_wrong_fault_is_refused_by_name(text: str) -> None:
    """The error quotes the fault and says what was wanted."""
    with pytest.raises(ConfigError, match="TTP_FAULTS"):
        parse_faults(text)


def test_hook_acts_at_its_place_only() -> None:
    """Other ranks and rounds get no hook at all, other steps and points pass."""
    faults = parse_faults("raise:rank=1,step=4,point=ready")
    assert injector(faults, 0, 0) is None
    assert injector(faults, 1, 1) is None
    hook = injector(faults, 1, 0)
    assert hook is not None
    hook("ready", 3)
    hook("done", 4)
    with pytest.raises(InjectedFault, match="rank 1, step 4"):
        hook("ready", 4)


def test_kill_is_a_real_sigkill() -> None:
    """The process ends by signal 9, without Python's leave."""
    code = (
        "from ttp.chaos.inject import injector, parse_faults\n"
        "injector(parse_faults('kill:rank=0,step=1,point=done'), 0, 0)('done', 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9
