"""Memory of the agent's: what may be taken of the node's, and that a name keeps its memory."""

from __future__ import annotations

import os

import pytest

from ttp.copies.memory import NoRoom, Owner
from ttp.copies.node_limits import Limit

MIB = 1 << 20


def owner(free: int) -> Owner:
    """An owner on a node of which so much may still be taken, whatever it takes."""
    return Owner([Limit(20 * free, 18 * free, "the test")])


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
