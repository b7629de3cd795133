"""Shares that are durable already: which of them a later write attempt of the step may link, and which it must never."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from ttp.checkpoint.write import WrittenShare, WrittenShares
from ttp.proto.messages import FileEntry, Part, ShareResult

STEP = 42
FIRST, SECOND = f"iter_{STEP:07d}_tmp_first", f"iter_{STEP:07d}_tmp_second"
PARTS = (Part("group", 0, 2), Part("group", 1, 2))


def written(directory: Path, tmp_name: str, *parts: Part) -> WrittenShare:
    """Write a file with these parts in a staging directory, as a rank has that answers the write order."""
    content = repr(parts).encode()
    name = f"rank_0_{'_'.join(f'{part.index}.{part.count}' for part in parts)}.distcp"
    (directory / tmp_name).mkdir(parents=True, exist_ok=True)
    (directory / tmp_name / name).write_bytes(content)
    entry = FileEntry(name, len(content), f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}", 0)
    return WrittenShare(str(directory), tmp_name, frozenset(parts), ShareResult((entry,)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def shares(tmp_path: Path) -> WrittenShares:
    """Return the memory of a rank that has written both parts of STEP in one staging directory, a file each."""
    made = WrittenShares()
    for part in PARTS:
        made.add(STEP, written(tmp_path, FIRST, part))
    return made


def test_a_later_write_of_the_step_links_what_is_durable(shares: WrittenShares, tmp_path: Path) -> None:
    """The same files under a second name; nothing remains to be written."""
    result, left = shares.take(STEP, str(tmp_path), SECOND, PARTS)
    assert left == set() and [file.name for file in result.files] == names(tmp_path / SECOND) == names(tmp_path / FIRST)
    for name in names(tmp_path / FIRST):
        assert (tmp_path / SECOND / name).samefile(tmp_path / FIRST / name)


def publish(folder: Path) -> None:
    (folder / FIRST).rename(folder / f"iter_{STEP:07d}")


def shorten(folder: Path) -> None:
    victim = folder / FIRST / "rank_0_0.2.distcp"
    victim.write_bytes(victim.read_bytes()[:-1])


CUT = tuple(Part("group", index, 3) for index in range(3))
OTHER = Part("other", 0, 1)
TAKEN: dict[str, tuple[int, str, str, Sequence[Part], Sequence[Part], Callable[[Path], None]]] = {
    "parts that another rank writes this time": (STEP, "", SECOND, (PARTS[1], OTHER), (PARTS[1],), lambda folder: None),
    "another step of the same parts": (STEP - 1, "", f"iter_{STEP - 1:07d}_tmp_older", PARTS, (), lambda folder: None),
    "another directory, with a file of that name": (STEP, "other", SECOND, PARTS, (), lambda folder: None),
    "parts of another cut: a holder has died": (STEP, "", SECOND, CUT, (), lambda folder: None),
    "a file that is shorter now": (STEP, "", SECOND, PARTS, (PARTS[1],), shorten),
    "a published directory, which has another name": (STEP, "", SECOND, PARTS, (), publish),
    "the same directory: nothing onto itself": (STEP, "", FIRST, (PARTS[0],), (), lambda folder: None),
}


@pytest.mark.parametrize(("step", "below", "tmp_name", "ordered", "linked", "before"), TAKEN.values(), ids=TAKEN.keys())
def test_only_ordered_parts_of_the_step_that_are_whole_in_that_directory_are_linked(
    shares: WrittenShares, tmp_path: Path, step: int, below: str, tmp_name: str, ordered: Sequence[Part], linked: Sequence[Part],
    before: Callable[[Path], None],
) -> None:  # fmt: skip
    """What is not linked remains to be written."""
    written(tmp_path / "other", FIRST, PARTS[0])
    before(tmp_path)
    there = set(names(tmp_path / below / tmp_name))
    result, left = shares.take(step, str(tmp_path / below), tmp_name, ordered)
    assert left == set(ordered) - set(linked)
    new = set(names(tmp_path / below / tmp_name)) - there
    assert (
        new == {file.name for file in result.files} == {f"rank_0_{part.index}.{part.count}.distcp" for part in linked}
    )


def test_a_share_with_more_than_the_ordered_parts_is_not_linked(tmp_path: Path) -> None:
    shares = WrittenShares()
    shares.add(STEP, written(tmp_path, FIRST, *PARTS))
    assert shares.take(STEP, str(tmp_path), SECOND, PARTS[:1]) == (ShareResult(()), {PARTS[0]})
    assert names(tmp_path / SECOND) == []


def test_shares_are_forgotten_when_another_step_is_written(shares: WrittenShares, tmp_path: Path) -> None:
    older = f"iter_{STEP - 1:07d}_tmp_older"
    shares.add(STEP - 1, written(tmp_path, older, PARTS[0]))
    result, left = shares.take(STEP - 1, str(tmp_path), f"{older}_again", PARTS)
    assert left == {PARTS[1]} and len(result.files) == 1
    assert shares.take(STEP, str(tmp_path), SECOND, PARTS) == (ShareResult(()), set(PARTS))
