"""Namespaces of a harness that was killed are removed by whichever harness comes next, and two may come at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttp.chaos.nodes import namespaces
from ttp.chaos.nodes.namespaces import NodesError, remove_orphans


@pytest.mark.parametrize("meanwhile", [True, False])
def test_an_orphan_may_be_removed_by_another_harness_meanwhile(
    meanwhile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meanwhile`: it is gone when this one comes to it; else it cannot be removed, and that is said."""
    spaces = ["ttp-4000000-0-a"]

    def fail(*arguments: str) -> str:
        if meanwhile:
            spaces.clear()
        raise NodesError(f"ip {' '.join(arguments)}: Cannot open network namespace")

    monkeypatch.setattr(namespaces, "NAME_FILES", tmp_path)
    monkeypatch.setattr(namespaces, "_namespaces", lambda: list(spaces))
    monkeypatch.setattr(namespaces, "_state_of", lambda pid: "")
    monkeypatch.setattr(namespaces, "_ip", fail)
    (tmp_path / spaces[0]).mkdir()
    if meanwhile:
        remove_orphans()
        assert not (tmp_path / "ttp-4000000-0-a").exists()
    else:
        with pytest.raises(NodesError, match="Cannot open network namespace"):
            remove_orphans()
