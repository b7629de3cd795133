"""Memory of the agent's: what may be taken of the node's, by the limits of its cgroups, and that a name keeps its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ttp.copies.memory import Limit, NoRoom, Owner, memory_limits

MIB = 1 << 20


def owner(free: int) -> Owner:
    """An owner on a node of which so much may still be taken, whatever it takes."""
    return Owner([Limit(20 * free, 18 * free, "the test")])


def test_a_part_of_the_memory_stays_free() -> None:
    assert Limit(100, 20, "").free == 75
    assert Limit(100, 99, "").free == 0


def test_more_than_is_free_is_refused_with_the_figures_and_takes_nothing() -> None:
    of = owner(10 * MIB)
    with pytest.raises(NoRoom) as refused:
        of.obtain("rank 0", 64 * MIB, 11 * MIB)
    assert str(refused.value) == (
        "11.0 MiB for rank 0 beside 0 B of other copies, expected at most 10.0 MiB (the test: 200.0 MiB, used 180.0 MiB)"
    )
    assert of.all() == {}


def test_what_was_promised_and_is_not_written_yet_is_not_given_twice() -> None:
    of = owner(10 * MIB)
    of.obtain("rank 0", 64 * MIB, 6 * MIB)
    with pytest.raises(
        NoRoom, match=r"^5\.0 MiB for rank 1 beside 6\.0 MiB of other copies, expected at most 4\.0 MiB"
    ):
        of.obtain("rank 1", 64 * MIB, 5 * MIB)
    of.obtain("rank 1", 64 * MIB, 4 * MIB)


def test_what_was_written_counts_as_used_and_not_as_promised() -> None:
    of = owner(10 * MIB)
    descriptor = of.obtain("rank 0", 64 * MIB, 6 * MIB)
    os.pwrite(descriptor, bytes(6 * MIB), 0)
    of.obtain("rank 1", 64 * MIB, 10 * MIB)  # the limits of the test do not change with what is used


def test_the_tightest_limit_counts() -> None:
    of = Owner([Limit(1000 * MIB, 0, "the host"), Limit(20 * MIB, 18 * MIB, "the cgroup")])
    with pytest.raises(NoRoom, match=r"expected at most 1\.0 MiB \(the cgroup"):
        of.obtain("rank 0", 8 * MIB, 2 * MIB)


def test_a_name_keeps_its_memory_and_another_size_is_another_one() -> None:
    of = owner(10 * MIB)
    descriptor = of.obtain("rank 0", MIB, MIB)
    os.pwrite(descriptor, b"kept", 0)
    assert os.pread(of.obtain("rank 0", MIB, MIB), 4, 0) == b"kept"
    again = of.obtain("rank 0", 2 * MIB, 10 * MIB)
    assert os.fstat(again).st_size == 2 * MIB
    assert os.pread(again, 4, 0) == bytes(4)
    ((kept, nbytes),) = of.all().values()
    assert nbytes == 2 * MIB and os.path.samestat(os.fstat(kept), os.fstat(again))


def test_a_descriptor_is_of_its_memory_whatever_is_dropped_meanwhile() -> None:
    """The number of a closed descriptor is the next file's that is opened."""
    of = owner(10 * MIB)
    descriptor = of.obtain("rank 0", MIB, MIB)
    os.pwrite(descriptor, b"kept", 0)
    again = of.obtain("rank 0", MIB, MIB)
    of.drop({"rank 0"})
    with open(os.devnull, "rb"):
        assert [os.pread(each, 4, 0) for each in (descriptor, again)] == [b"kept", b"kept"]


def test_memory_that_is_dropped_is_free_again() -> None:
    of = owner(10 * MIB)
    os.close(of.obtain("rank 0", MIB, 10 * MIB))
    ((descriptor, _),) = of.all().values()
    of.drop({"rank 0", "a name that is not there"})
    assert of.all() == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    of.obtain("rank 1", MIB, 10 * MIB)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A /proc and a /sys/fs/cgroup with nothing but the host's memory."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  600 kB\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text.rstrip() + "\n")


def limits(tree: Path) -> list[tuple[int, int, str]]:
    found = memory_limits(tree / "proc", tree / "cgroup")
    return [(one.total, one.used, one.source.removeprefix(f"{tree}/")) for one in found]


HOST = (1000 << 10, 400 << 10, "MemTotal of this host")


def test_without_a_cgroup_the_host_counts(tree: Path) -> None:
    assert limits(tree) == [HOST]


def test_a_cgroup_of_version_two_and_all_above_it_count(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("0::/pod/container\n")
    write(tree / "cgroup/pod/container", max="max", current="7")
    write(tree / "cgroup/pod", max="500", current="100")
    write(tree / "cgroup", max="900", current="300")
    write(tree, max="1", current="1")  # beyond the top
    assert limits(tree) == [HOST, (500, 100, "cgroup/pod/memory.max"), (900, 300, "cgroup/memory.max")]


def test_a_cgroup_of_version_one_and_all_above_it_count(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("5:cpu:/x\n4:hugetlb,memory:/slice/job\n")
    write(tree / "cgroup/memory/slice/job", limit_in_bytes="400", usage_in_bytes="50")
    write(tree / "cgroup/memory/slice", limit_in_bytes="300", usage_in_bytes="60")
    write(tree / "cgroup", limit_in_bytes="1", usage_in_bytes="1")  # beyond the top
    assert [(total, used) for total, used, _ in limits(tree)][1:] == [(400, 50), (300, 60)]


def test_a_cgroup_whose_folder_is_not_shown_is_passed_over(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("0::/../outside\nnot a line of a cgroup\n")
    assert limits(tree)[0] == HOST


@pytest.mark.parametrize(
    ("stat", "used"),
    [
        ("anon 10\ninactive_file 80\n", 20),
        ("inactive_file 5\ntotal_inactive_file 90\n", 10),
        ("inactive_file 500\n", 0),
        ("a line of three words\n", 100),
    ],
)
def test_cached_files_that_the_kernel_gives_back_are_not_used_memory(tree: Path, stat: str, used: int) -> None:
    (tree / "proc/self/cgroup").write_text("0::/job\n")
    write(tree / "cgroup/job", max="500", current="100", stat=stat)
    assert limits(tree)[1][:2] == (500, used)


def test_this_host_has_limits() -> None:
    assert all(one.total > 0 for one in memory_limits())
