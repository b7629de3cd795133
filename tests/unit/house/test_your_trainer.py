"""docs/your_trainer.md and docs/ttp_protect.md name what the code has: every argument of `ttp.protect` with its default, and words that are really said."""

from __future__ import annotations

import inspect
import re

import ttp
from tests.shown import ROOT
from ttp.adopt import usage
from ttp.adopt.trainer_state import position, seen
from ttp.adopt.transformers_callback import TTPCallback

LOOPS, TEXT = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("your_trainer.md", "ttp_protect.md"))
NONE = "must be given"
PARAMETERS = inspect.signature(ttp.protect).parameters


def part(name: str) -> list[list[str]]:
    """Return the rows of a marked table, as cells."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", TEXT, re.DOTALL)
    assert found is not None, f"docs/ttp_protect.md has no table {name}"
    return [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in found[1].splitlines()[2:]]


def test_every_argument_is_listed_with_its_default_and_its_unit() -> None:
    """In the order of the signature, and nothing that is not there."""
    expected = [
        (f"`{name}`", NONE if each.default is inspect.Parameter.empty else f"`{each.default!r}`")
        for name, each in PARAMETERS.items()
    ]
    rows = part("arguments")
    assert [(name, default) for name, default, *_ in rows] == expected
    assert all(len(row) == 4 and len(row[2]) > 4 and len(row[3]) > 10 for row in rows)
    numbers = [name for name, each in PARAMETERS.items() if type(each.default) is int]
    assert numbers and all(row[2] == "steps" for row in rows if row[0].strip("`") in numbers), "a number has a unit"


def test_arguments_are_given_as_the_document_says() -> None:
    """Two by place; the docstring explains all the others."""
    by_place = [name for name, each in PARAMETERS.items() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_place == ["model", "optimizer"]
    explained = {name for names in re.findall(r"([\w, ]+): ", ttp.protect.__doc__ or "") for name in names.split(", ")}
    assert set(PARAMETERS) - set(by_place) <= {name.strip() for name in explained}


def test_what_the_callback_hands_on_are_arguments() -> None:
    """Its docstring names the same."""
    line = next(line for line in TEXT.splitlines() if line.startswith("`TTPCallback` takes"))
    named = re.findall(r"`(\w+)`", line)[1:]
    assert len(named) > 4 and set(named) <= set(PARAMETERS)
    assert set(named[1:]) == set(re.findall(r"\w+", (TTPCallback.__init__.__doc__ or "").partition("protect`: ")[2]))


def test_quoted_warnings_are_said_by_the_code() -> None:
    """A message that changes has to change here, too."""
    for table, modules, count in (("words", [usage], 3), ("mismatches", [seen, position], 11)):
        code = "".join(map(inspect.getsource, modules))
        words = [piece.strip() for row in part(table) for piece in row[0].strip("`").split("...") if piece.strip()]
        assert len(words) == count and all(word in code for word in words), words


def test_the_document_begins_with_three_whole_loops() -> None:
    """They are the examples, which a test runs: every line but the docstring."""
    blocks = re.findall(r"```python\n(.*?)```", LOOPS, re.DOTALL)
    folder = ROOT / "examples" / "your_trainer"
    names = ["nanogpt.py", "accelerate_loop.py", "ddp_sampler.py"]
    assert {path.name for path in folder.glob("*.py")} == set(names)
    for block, name in zip(blocks, names, strict=False):
        _, _, code = (folder / name).read_text(encoding="utf-8").partition('"""\n\n')
        assert block == code, f"the document does not show {name}"
