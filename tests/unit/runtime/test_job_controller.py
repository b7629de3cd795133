"""How a process that takes a lost one's place comes to its job's controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttp.config import Settings, ordered_by, replaces
from ttp.errors import ConfigError
from ttp.exchange import discovery
from ttp.runtime.job_controller import JobController


def test_it_comes_to_the_controller_that_had_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the first one, whose address the store still has; neither does rank 0 start another one."""
    monkeypatch.setattr(discovery, "find", lambda *_: "127.0.0.1:4000")
    monkeypatch.setattr(JobController, "store", lambda self: None)
    for value, address in (("7 127.0.0.1:4001", "127.0.0.1:4001"), ("7", "127.0.0.1:4000")):
        monkeypatch.setenv("TTP_VACANT", value)
        for rank in (0, 1):
            assert JobController(Settings(), tmp_path, rank, 2).open(1.0) == address
        assert replaces() == 7
    assert list(tmp_path.iterdir()) == []


def test_the_variable_is_checked() -> None:
    assert (replaces({}), ordered_by({})) == (0, "")
    with pytest.raises(ConfigError, match="invalid TTP_VACANT="):
        replaces({"TTP_VACANT": "x 127.0.0.1:4000"})
