"""What limits a process: the memory of the host and of its cgroups, of both versions, and their numbers of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttp.copies.node_limits import Limit, memory_limits, process_limits


def test_a_part_of_the_memory_stays_free() -> None:
    assert Limit(100, 20, "").free == 75
    assert Limit(100, 99, "").free == 0


def test_what_is_not_used_is_available() -> None:
    assert Limit(100, 20, "").available == 80
    assert Limit(100, 120, "").available == 0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A /proc and a /sys/fs/cgroup with nothing but the host's memory."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  600 kB\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def write(folder: Path, controller: str = "memory", **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{controller}.{name}").write_text(text.rstrip() + "\n")


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
        ("inactive_file 10\nactive_file 20\nslab_reclaimable 30\nslab 35\n", 40),
        ("active_file 5\ntotal_active_file 60\n", 40),
        ("a line of three words\n", 100),
    ],
)
def test_caches_that_the_kernel_gives_back_are_not_used_memory(tree: Path, stat: str, used: int) -> None:
    (tree / "proc/self/cgroup").write_text("0::/job\n")
    write(tree / "cgroup/job", max="500", current="100", stat=stat)
    assert limits(tree)[1][:2] == (500, used)


def test_this_host_has_limits() -> None:
    assert all(one.total > 0 for one in memory_limits())


def test_processes_are_limited_by_cgroups_of_version_two(tree: Path) -> None:
    """No limit is "max"; cached files are none of their numbers."""
    (tree / "proc/self/cgroup").write_text("0::/pod/container\n")
    write(tree / "cgroup/pod/container", stat="inactive_file 99", max="7", current="7")
    write(tree / "cgroup/pod/container", "pids", max="512", current="100")
    write(tree / "cgroup/pod", "pids", max="max", current="100")
    assert process_limits(tree / "proc", tree / "cgroup") == [Limit(512, 100, f"{tree}/cgroup/pod/container/pids.max")]


def test_processes_are_limited_by_cgroups_of_version_one(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("8:pids:/job\n4:memory:/job\n")
    write(tree / "cgroup/pids/job", "pids", max="64", current="3")
    assert process_limits(tree / "proc", tree / "cgroup") == [Limit(64, 3, f"{tree}/cgroup/pids/job/pids.max")]


def test_without_a_cgroup_processes_have_no_such_limit(tree: Path) -> None:
    assert process_limits(tree / "proc", tree / "cgroup") == []
