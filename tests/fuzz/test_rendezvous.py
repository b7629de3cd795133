"""Entries of a rendezvous store that another program has written: read, or as if they were absent, and what follows of them is decided all the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from tests.fuzz.test_files import changed
from ttp.launch.rendezvous import departures, running_job, spare_nodes
from ttp.launch.rendezvous.departures import Excluded
from ttp.launch.rendezvous.multi_endpoint import read_epoch
from ttp.launch.rendezvous.running_job import RunningJob, RunningNode
from ttp.launch.rendezvous.spare_nodes import Agent, Silence, place_to_take, to_meet

settings.load_profile("fuzz")

RUN = "run"
AGENT = asdict(Agent(node="node-b", state="running", number=2, beat=7, start=1, size=2, epoch=3))
JOB = {"answer": "host 29500 1\n-", "start": 1, "epoch": 3, "nodes": [[1, 0, 4, 0, 4], [2, 2, 4, 2, 4]]}
BYTES = (b"", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"\0", b"null", b"{}", b"-1", b"1_0", b" 7 ", b"a\nb")


def an_entry(base: object, rng: random.Random) -> bytes:
    """Return an entry with a value of any kind in it, or bytes at random. `base`: what agents write; a string is written as it is."""
    content = base.encode() if isinstance(base, str) else json.dumps(changed(base, rng)).encode()
    if rng.random() < 0.25 or isinstance(base, str):
        content = rng.choice((content, *BYTES, rng.randbytes(20), content[: rng.randrange(len(content))]))
    return content


def put(store: Store, key: str, entry: bytes) -> None:
    store.set(key, entry)  # type: ignore[arg-type]  # bytes are taken too


def reads_the_running_job(store: Store, rng: random.Random) -> None:
    put(store, running_job._key(RUN), an_entry(JOB, rng))
    job = running_job.read(store, RUN)
    if job is not None:
        assert all(len(node.assigned) == 4 for node in job.nodes)
        job.number_of([0, 1])
    running_job.has_all_nodes(store, RUN, Silence(4.0), 2)


def reads_agents(store: Store, rng: random.Random) -> None:
    key = spare_nodes._key(RUN)
    for number in range(1, int(store.add(key, rng.choice((0, 1, 3)))) + 1):
        put(store, f"{key}/{number}", an_entry({**AGENT, "number": number}, rng))
    agents = spare_nodes.read_agents(store, RUN)
    lost = Silence(4.0).of(agents, 1.0)
    place_to_take(agents, lost, 3)
    for own in agents:
        to_meet(agents, lost, own, epoch=3, min_nodes=1, max_nodes=4, elsewhere=True, moved=False)


def reads_departures(store: Store, rng: random.Random) -> None:
    found = [an_entry("a reason", rng) for _ in range(5)]
    put(store, f"{departures._left(RUN)}/1", found[0])
    put(store, departures._over(RUN), found[1])
    put(store, departures._drain(RUN, 1), found[2])
    put(store, departures.FAILED, found[3])
    put(store, f"{departures._sick(RUN)}/1", an_entry(asdict(Excluded("node-b", "its disk")), rng))
    texts = (departures.over(store, RUN), departures.asked_to_leave(store, RUN, 1), departures.failed_for_good(store))
    for text in (*departures.departures_after(store, RUN, 0), *texts):
        text.encode()
    (excluded,) = departures.excluded_after(store, RUN, 0)
    str(excluded).encode()


def reads_a_seat(store: Store, rng: random.Random) -> None:
    put(store, spare_nodes._seat(RUN, 1, 0), an_entry("3", rng))
    before = spare_nodes.seated(store, RUN, 1, 0)
    spare_nodes.sit_down(store, RUN, 1, 0, before, 4)


def reads_an_epoch(store: Store, rng: random.Random) -> None:
    """Anything else is as a store that is lost."""
    put(store, "epoch", an_entry("3", rng))
    try:
        assert read_epoch(store, "epoch") >= 0
    except RuntimeError as error:
        assert "\n" not in str(error)


READERS: tuple[Callable[[Store, random.Random], Any], ...] = (
    reads_the_running_job, reads_agents, reads_departures, reads_a_seat, reads_an_epoch,
)  # fmt: skip


@pytest.mark.parametrize("read", READERS)
@given(rng=st.randoms(use_true_random=True))
def test_an_entry_is_read_or_absent(read: Callable[[Store, random.Random], None], rng: random.Random) -> None:
    read(HashStore(), rng)


def test_the_entries_are_those_that_agents_write() -> None:
    """Nothing is fuzzed that is in no store."""
    store = HashStore()
    put(store, running_job._key(RUN), json.dumps(JOB).encode())
    nodes = tuple(RunningNode(agent, tuple(assigned)) for agent, *assigned in JOB["nodes"])  # type: ignore[attr-defined]
    assert running_job.read(store, RUN) == RunningJob("host 29500 1\n-", 1, 3, nodes)
    assert spare_nodes._decoded(json.dumps(AGENT).encode()) == Agent(**AGENT)
