"""A seal fits one key, one context and one value; a store whose entries are sealed has what this job has written, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistStoreError, HashStore, Store, TCPStore  # type: ignore[attr-defined]

from tests.unit.runtime.conftest import LONG_S
from ttp.exchange import sealed_store
from ttp.exchange.sealed_store import Seal, SealedStore, sealed, unsealed
from ttp.identity.sealed import NotSealed, seal, unseal

KEYS = st.binary(min_size=1, max_size=40)
CONTEXTS = st.lists(st.text(max_size=6), max_size=4).map(tuple)
VALUES = st.binary(max_size=60)


@given(KEYS, CONTEXTS, VALUES)
def test_what_was_sealed_is_returned(key: bytes, context: tuple[str, ...], value: bytes) -> None:
    assert unseal(key, context, seal(key, context, value)) == value


@given(KEYS, CONTEXTS, VALUES, st.data())
def test_an_entry_with_a_changed_byte_is_refused(
    key: bytes, context: tuple[str, ...], value: bytes, data: st.DataObject
) -> None:
    """Wherever it is, and also one that is missing or too many."""
    entry = seal(key, context, value)
    at = data.draw(st.integers(0, len(entry) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != entry[at]))
    for changed in (entry[:at] + bytes([other]) + entry[at + 1 :], entry[:at] + entry[at + 1 :], entry + b"x"):
        with pytest.raises(NotSealed):
            unseal(key, context, changed)


@given(KEYS, KEYS, CONTEXTS, CONTEXTS, VALUES)
def test_an_entry_of_another_key_or_context_is_refused(
    key: bytes, other: bytes, context: tuple[str, ...], elsewhere: tuple[str, ...], value: bytes
) -> None:
    """No context is another one because its parts are cut elsewhere."""
    entry = seal(key, context, value)
    if key != other:
        with pytest.raises(NotSealed):
            unseal(other, context, entry)
    if context != elsewhere:
        with pytest.raises(NotSealed):
            unseal(key, elsewhere, entry)


def test_parts_of_a_context_are_not_run_together() -> None:
    """`job/1` of `1key` is not `job/11` of `key`."""
    with pytest.raises(NotSealed):
        unseal(b"k", ("job/1", "1key"), seal(b"k", ("job/11", "key"), b""))
    with pytest.raises(NotSealed):
        unseal(b"k", ("job",), seal(b"k", ("job", "key"), b"value").removesuffix(b"value") + b"\0" * 7 + b"\3keyvalue")


@pytest.mark.parametrize(
    ("entry", "got"),
    [(b"", "0 bytes without a seal"), (b"\x80\x04.", "3 bytes"), (b"ttp1 " + b"0" * 80, "a seal that")],
)
def test_a_refusal_names_what_was_expected(entry: bytes, got: str) -> None:
    with pytest.raises(
        NotSealed, match=f"got {got}.*expected an entry that this job has sealed as job/0 / ttp/key. Start"
    ):
        unseal(b"k", ("job/0", "ttp/key"), entry)


HOW = Seal(b"k" * 32, ("job/3",))


@pytest.fixture(params=["hash", "tcp"])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store that anybody can write into."""
    monkeypatch.setattr(sealed_store, "LOOK_S", 0.01)
    monkeypatch.setattr(sealed_store, "_refused", set())
    store: Store = (
        HashStore()
        if request.param == "hash"
        else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONG_S))
    )
    store.set_timeout(timedelta(seconds=0.2))
    yield store


@pytest.fixture
def store(base: Store) -> Store:
    return sealed(base, HOW)


def test_a_store_without_a_seal_is_as_it_is(base: Store) -> None:
    assert sealed(base, None) is base and unsealed(base) is base


def test_entries_are_sealed_in_the_store_and_plain_for_the_job(base: Store, store: Store) -> None:
    """Each operation that the job uses; another client of the same job reads them."""
    other = sealed(base, HOW)
    store.set("a", "1")
    assert base.get("a").endswith(b" 1") and base.get("a") != b"1"
    assert other.get("a") == b"1" and other.check(["a"]) and not other.check(["a", "b"])
    store.multi_set(["b", "c"], ["2", "x\ny"])  # type: ignore[attr-defined]
    assert other.multi_get(["a", "b", "c"]) == [b"1", b"2", b"x\ny"] and other.check(["a", "b", "c"])
    for line in ("d\n", "e\n"):
        store.append("list", line)  # type: ignore[attr-defined]
    assert other.check(["list"]) and other.get("list") == b"d\ne\n"
    assert store.compare_set("epoch", "", "1") == b"1" and other.compare_set("epoch", "", "5") == b"1"
    assert other.compare_set("epoch", "1", "2") == b"2" and store.get("epoch") == b"2"
    assert store.add("n", 2) == 2 and other.add("n", 1) == 3 and unsealed(store).get("n") == b"3"


def test_what_another_program_has_written_is_absent_and_logged_once(
    base: Store, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises nothing; its writer can be another job, or an earlier attempt of this one."""
    earlier = sealed(base, Seal(HOW.key, ("job/2",)))
    base.set("ttp/a", "garbage")
    earlier.set("ttp/b", "old")
    store.set("ttp/c", "mine")
    base.set("ttp/d", base.get("ttp/c").decode())
    for _ in range(2):
        assert not any(store.check([key]) for key in ("ttp/a", "ttp/b", "ttp/d"))
        assert not store.check(["ttp/c", "ttp/a"])
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        "ttp/a",
        "ttp/b",
        "ttp/d",
    ]
    assert "counts as absent: got 7 bytes without a seal, expected an entry that this job has sealed as" in caplog.text


def test_an_entry_that_is_refused_is_waited_for_as_one_that_is_absent(base: Store, store: Store) -> None:
    """In the store's own time, and with the store's own error."""
    base.set("a", "garbage")
    for read in (lambda: store.get("a"), lambda: store.multi_get(["a"])):
        with pytest.raises(DistStoreError, match="'a' is not this job's"):
            read()
    base.set_timeout(timedelta(seconds=30))
    looks = []

    class Overwritten(SealedStore):
        def _open(self, key: str, entry: bytes) -> bytes | None:
            looks.append(entry)
            if len(looks) == 2:
                store.set("a", "1")
            return super()._open(key, entry)

    assert Overwritten(base, HOW).get("a") == b"1" and looks[:2] == [b"garbage"] * 2


def test_a_refused_entry_does_not_keep_the_job_from_writing(base: Store, store: Store) -> None:
    """Where nothing was expected; where something was, it is not there."""
    base.set("epoch", "9")
    assert store.compare_set("epoch", "", "1") == b"1" and store.get("epoch") == b"1"
    base.set("epoch", "9")
    assert store.compare_set("epoch", "1", "2") == b""


def test_of_a_list_each_line_is_looked_at(base: Store, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A forged line, one of another list, and one that is a whole entry elsewhere are left out."""
    store.append("list", "1 a\n")  # type: ignore[attr-defined]
    store.append("other", "2 b\n")  # type: ignore[attr-defined]
    base.append("list", base.get("other").decode() + "3 c\n")  # type: ignore[attr-defined]
    store.append("list", "4 d\n")  # type: ignore[attr-defined]
    assert store.get("list") == b"1 a\n4 d\n" and store.check(["list"])
    assert "'list' is refused" in caplog.text
    store.set("entry", "5 e\n")
    base.append("entry", base.get("entry").decode())  # type: ignore[attr-defined]
    assert not store.check(["entry"])


def test_a_seal_does_not_show_its_key() -> None:
    assert "kkk" not in repr(HOW) and HOW.log is logging.getLogger("ttp")
