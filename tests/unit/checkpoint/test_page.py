"""docs/checkpoints.md shows what really is on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ttp
from ttp.config import Settings

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
TREE = PAGE[PAGE.index("## On disk") : PAGE.index("So it is for")]


def shown() -> dict[str, list[re.Pattern[str]]]:
    """Return patterns of the names that the tree shows, numbers and hashes being any, by the folder they lie in."""
    found: dict[str, list[re.Pattern[str]]] = {"": [], "iter": [], "ttp_log": []}
    folder = ""
    for line in re.findall(r"^[│├└ ].*", TREE, re.MULTILINE):
        match = re.match(r"(?P<depth>(?:│   |    )?)[├└]── (?P<name>[^ ]+)", line)
        assert match, line
        name = match["name"].rstrip("/")
        if not match["depth"]:
            folder = "iter" if re.fullmatch(r"iter_\d+", name) else name
        any_number = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "[0-9a-f]+", re.escape(name)).replace("…", ".*")
        found[folder if match["depth"] else ""].append(re.compile(any_number))
    return found


def unknown(names: list[str], patterns: list[re.Pattern[str]]) -> list[str]:
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))


def test_the_folder_of_a_protected_trainer_is_as_shown(tmp_path: Path) -> None:
    """A periodic checkpoint and a dying gasp of a job with a real controller: every name that is there stands in the tree."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], save_interval=2, settings=Settings(standbys=0))

    def train() -> None:
        for step in range(1, 6):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if step == 4:
                raise ZeroDivisionError
            optimizer.step()

    with pytest.raises(ZeroDivisionError):
        ttp.ttp_to_persist(train)()
    guard.close()
    tree, outputs = shown(), [re.compile(r"(journal|standby)[\d_]+\.log"), re.compile(r"standby_[\d_]+\.jsonl\.inputs")]
    assert [len(tree[folder]) for folder in ("", "iter", "ttp_log")] == [12, 6, 7]
    assert unknown([path.name for path in tmp_path.iterdir()], tree[""]) == []
    checkpoints = sorted(tmp_path.glob("iter_*"))
    assert [path.name for path in checkpoints] == ["iter_0000002", "iter_0000003"]
    for path in checkpoints:
        names = [file.name for file in path.iterdir()]
        assert unknown(names, tree["iter"]) == [] and len(names) == 4
    assert unknown([path.name for path in (tmp_path / "ttp_log").iterdir()], [*tree["ttp_log"], *outputs]) == []
