"""Which of a worker's modules are learned for later workers."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from ttp.exchange import imported_modules


def test_installed_modules_and_ttps_own_are_listed_and_a_scripts_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TTP's also where it is installed from a checkout, outside any site-packages."""
    own = types.ModuleType("beside_the_script")
    own.__file__ = str(tmp_path / "beside_the_script.py")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    imported_modules.write(tmp_path)
    listed = imported_modules.read(tmp_path)
    assert {"pytest", "ttp.exchange.imported_modules"} <= set(listed)
    assert own.__name__ not in listed
