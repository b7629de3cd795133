"""Another torch than the tested ones is a warning at the start that names both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ttp
from ttp import session, torch_range
from ttp.config import Settings
from ttp.launch.torch_names import RUN_WITH


@pytest.mark.parametrize(
    ("version", "within"),
    [
        ("2.13.0", True),
        ("2.13.1+cpu", True),
        ("2.14.1+cu130", True),
        ("2.12.9", False),
        ("2.14.2", False),
        ("2.9.1", False),
        ("3.0.0", False),
        ("2.15.0a0+git1234", False),
        ("2.14.0a0+git1", True),
    ],
)
def test_a_version_outside_the_tested_range_is_named_with_it(version: str, within: bool) -> None:
    said = torch_range.untested(version)
    assert (said == "") == within
    assert within or (version in said and all(tested in said for tested in torch_range.TESTED))


def test_the_tested_range_is_in_one_place_and_holds_the_installed_torch() -> None:
    assert RUN_WITH == torch_range.TESTED and not torch_range.untested(torch.__version__)
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text(encoding="utf-8")
    assert all(f"{version}" in page for version in torch_range.TESTED)


def test_a_start_warns_of_another_torch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 says it for all."""
    for tested, rank, count in (("2.0.1", 0, 1), ("2.0.1", 1, 0), (torch_range.TESTED[1], 0, 0)):
        caplog.clear()
        monkeypatch.setattr(session, "world", lambda rank=rank: (rank, 2))
        monkeypatch.setattr(torch_range, "TESTED", ("2.0.0", tested))
        optimizer = ttp.TTPReplicaOptimizer(torch.nn.Linear(8, 4).named_parameters(), replicas=1, lr=0.05)
        ttp.start(optimizer, save_dirs=[tmp_path], settings=Settings(enable=False)).close()
        assert caplog.text.count(f"torch {torch.__version__} is installed, and TTP is tested with torch 2.0.0") == count
