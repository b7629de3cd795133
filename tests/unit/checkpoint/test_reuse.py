"""Shares that are durable already: which of them a later attempt of the step may link, and which it must never."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ttp.checkpoint.write import WrittenShare, WrittenShares
from ttp.proto.messages import FileEntry, Part, ShareResult

STEP = 42
FIRST, SECOND = f"iter_{STEP:07d}_tmp_first", f"iter_{STEP:07d}_tmp_second"
PARTS = (Part("group", 0, 2), Part("group", 1, 2))


def written(directory: Path, tmp_name: str, *parts: Part) -> WrittenShare:
    """Write a file with these parts in an attempt, as a rank has that answers the write order."""
    content = repr(parts).encode()
    name = f"rank_0_{'_'.join(f'{part.index}.{part.count}' for part in parts)}.distcp"
    (directory / tmp_name).mkdir(parents=True, exist_ok=True)
    (directory / tmp_name / name).write_bytes(content)
    entry = FileEntry(name, len(content), hashlib.sha256(content).hexdigest(), 0)
    return WrittenShare(str(directory), tmp_name, frozenset(parts), ShareResult((entry,)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def shares(tmp_path: Path) -> WrittenShares:
    """Return the memory of a rank that has written both parts of STEP in one attempt, a file each."""
    made = WrittenShares()
    for part in PARTS:
        made.add(STEP, written(tmp_path, FIRST, part))
    return made


def test_a_later_attempt_of_the_step_links_what_is_durable(shares: WrittenShares, tmp_path: Path) -> None:
    """The same files under a second name; nothing remains to be written."""
    result, left = shares.take(STEP, str(tmp_path), SECOND, PARTS)
    assert left == set() and [file.name for file in result.files] == names(tmp_path / SECOND) == names(tmp_path / FIRST)
    for name in names(tmp_path / FIRST):
        assert (tmp_path / SECOND / name).samefile(tmp_path / FIRST / name)


def test_only_the_ordered_parts_are_linked(shares: WrittenShares, tmp_path: Path) -> None:
    """The others were ordered of another rank this time: a file of them here would store them twice."""
    result, left = shares.take(STEP, str(tmp_path), SECOND, [PARTS[1], Part("other", 0, 1)])
    assert left == {Part("other", 0, 1)}
    assert [file.name for file in result.files] == names(tmp_path / SECOND) == ["rank_0_1.2.distcp"]


def test_a_share_with_more_than_the_ordered_parts_is_not_linked(tmp_path: Path) -> None:
    shares = WrittenShares()
    shares.add(STEP, written(tmp_path, FIRST, *PARTS))
    assert shares.take(STEP, str(tmp_path), SECOND, PARTS[:1]) == (ShareResult(()), {PARTS[0]})
    assert names(tmp_path / SECOND) == []


def test_shares_of_another_step_are_never_linked(shares: WrittenShares, tmp_path: Path) -> None:
    """The older step of a dump for which no directory takes the newer one: same parts, other numbers."""
    attempt = f"iter_{STEP - 1:07d}_tmp_older"
    assert shares.take(STEP - 1, str(tmp_path), attempt, PARTS) == (ShareResult(()), set(PARTS))
    assert names(tmp_path / attempt) == []
    shares.add(STEP - 1, written(tmp_path, attempt, PARTS[0]))
    result, left = shares.take(STEP - 1, str(tmp_path), f"{attempt}_again", PARTS)
    assert left == {PARTS[1]} and len(result.files) == 1
    assert shares.take(STEP, str(tmp_path), SECOND, PARTS) == (ShareResult(()), set(PARTS)), "they were forgotten"


def test_shares_in_another_directory_are_never_linked(shares: WrittenShares, tmp_path: Path) -> None:
    """The first directory refused the step, and the next is tried: the publisher looks for the files there. Not even where a directory
    has a file of that name in an attempt of that name."""
    other = tmp_path / "other"
    written(other, FIRST, PARTS[0])
    assert shares.take(STEP, str(other), SECOND, PARTS) == (ShareResult(()), set(PARTS))
    assert names(other / SECOND) == []


def test_parts_of_another_cut_are_never_linked(shares: WrittenShares, tmp_path: Path) -> None:
    """A holder has died since: the group is cut into three parts instead of two, and part 0 is other elements."""
    cut = tuple(Part("group", index, 3) for index in range(3))
    assert shares.take(STEP, str(tmp_path), SECOND, cut) == (ShareResult(()), set(cut))
    assert names(tmp_path / SECOND) == []


def test_a_file_that_changed_its_size_is_not_linked(shares: WrittenShares, tmp_path: Path) -> None:
    """It is written again, with the others of its share; the share that is whole is linked."""
    victim = tmp_path / FIRST / "rank_0_0.2.distcp"
    victim.write_bytes(victim.read_bytes()[:-1])
    result, left = shares.take(STEP, str(tmp_path), SECOND, PARTS)
    assert left == {PARTS[0]} and [file.name for file in result.files] == names(tmp_path / SECOND)


def test_a_published_attempt_gives_nothing(shares: WrittenShares, tmp_path: Path) -> None:
    """Its directory has another name now."""
    (tmp_path / FIRST).rename(tmp_path / f"iter_{STEP:07d}")
    assert shares.take(STEP, str(tmp_path), SECOND, PARTS) == (ShareResult(()), set(PARTS))
    assert names(tmp_path / SECOND) == []


def test_what_is_in_the_attempt_already_is_not_linked_onto_itself(shares: WrittenShares, tmp_path: Path) -> None:
    """A second order for more parts of the same attempt."""
    assert shares.take(STEP, str(tmp_path), FIRST, [PARTS[0]]) == (ShareResult(()), {PARTS[0]})
    assert len(names(tmp_path / FIRST)) == 2
