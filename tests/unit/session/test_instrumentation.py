"""Nothing of the fault harness is in a process that is not under test; what is plugged in gets every call."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ttp.chaos.faults.rank_hook import RankFaults
from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.runtime.instrumentation import NoInstrumentation, instrumentation


def test_without_faults_the_harness_is_not_even_loaded() -> None:
    """A production job has nothing of it in its processes."""
    code = (
        "import sys\n"
        "import ttp.session, ttp.adopt.protect\n"
        "from ttp.config import Settings\n"
        "from ttp.runtime.instrumentation import NoInstrumentation, instrumentation\n"
        "assert isinstance(instrumentation(Settings(), 0, 2, ['/checkpoints']), NoInstrumentation)\n"
        "sys.exit(any(name.startswith('ttp.chaos') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd="/", timeout=120, check=False).returncode == 0


def test_faults_are_plugged_in_where_they_are_asked_for() -> None:
    """By TTP_FAULTS, or by the socket of a harness; a wrong one is refused."""
    assert isinstance(
        instrumentation(Settings(faults="kill:rank=0,step=3,point=ready"), 0, 2, ["/checkpoints"]), RankFaults
    )
    with pytest.raises(ConfigError, match="TTP_CHAOS"):
        instrumentation(Settings(chaos="/nowhere"), 0, 2, ["/checkpoints"])
    with pytest.raises(ConfigError, match="TTP_FAULTS"):
        instrumentation(Settings(faults="nonsense"), 0, 2, ["/checkpoints"])


def test_the_null_object_hooks_nothing() -> None:
    """An optimizer and a holder stay as they are."""
    optimizer, holder = _Untouched(), _Untouched()
    nothing = NoInstrumentation()
    nothing.attach(optimizer, holder)  # type: ignore[arg-type]
    nothing.at_start("start")
    nothing.close()
    assert not vars(optimizer) and not vars(holder)


class _Untouched:
    pass
