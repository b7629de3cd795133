"""How nodes come to one secret, how different ones are found out, and what a stranger who writes into the rendezvous store achieves."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig

from tests.unit.launch.attempts import DEADLINE_S
from tests.unit.launch.test_fresh_store import FixedNodes, join_all
from tests.unit.launch.test_multi_endpoint import Handler, free_place, quick
from tests.waiting import until
from ttp.errors import ConfigError
from ttp.identity.secret import Secret
from ttp.launch.hosts.listening import serve
from ttp.launch.rendezvous import departures, static_join
from ttp.launch.rendezvous.choose import make_rendezvous
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.rendezvous.job_secret import JobSecret, OtherSecret, Read
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores, epoch_key
from ttp.launch.rendezvous.sealed_state import StateRefused
from ttp.launch.rendezvous.spare_nodes import read_agents
from ttp.launch.rendezvous.store_failover import FailoverRendezvous

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("agents_in_one_process")

A, B = Secret(b"a" * 32), Secret(b"b" * 32)


class Given:
    """A node's secret, which a test may replace."""

    def __init__(self, secret: Secret | None) -> None:
        self.secret = secret
        self.error = ""

    def __call__(self) -> Secret | None:
        if self.error:
            raise ConfigError(self.error)
        return self.secret


def entries(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list_keys() if store.check([key])}


def nodes_of(base: Store, reads: list[Read | None], *, static: bool) -> list[FreshStoreRendezvous]:
    """Return the handlers of nodes that have met in a store."""
    return [
        FreshStoreRendezvous(
            FixedNodes(base, rank, len(reads), prefixed=not static),
            "127.0.0.1",
            same_keys_every_round=static,
            join_timeout_s=DEADLINE_S,
            secret=JobSecret("run", read),
        )
        for rank, read in enumerate(reads)
    ]


BACKENDS = pytest.mark.parametrize("static", [False, True], ids=["c10d", "static"])


@BACKENDS
def test_a_given_secret_is_every_nodes_and_is_published_nowhere(static: bool) -> None:
    base = HashStore()
    nodes = nodes_of(base, [lambda: A, lambda: A, lambda: A], static=static)
    for _ in range(2):
        join_all(nodes)
        assert [node.secret for node in nodes] == [A, A, A]
    for entry in entries(base).values():
        assert A.value not in entry and A.value.hex().encode() not in entry


@BACKENDS
def test_nodes_without_a_secret_agree_on_one_for_each_attempt(static: bool) -> None:
    """It is as long as one that is made for a file."""
    nodes = nodes_of(HashStore(), [lambda: None] * 3, static=static)
    agreed = []
    for _ in range(2):
        join_all(nodes)
        assert nodes[0].secret == nodes[1].secret == nodes[2].secret
        agreed.append(nodes[0].secret)
    assert agreed[0] != agreed[1] and len(agreed[0].value) == 64


def test_a_node_alone_makes_one_for_itself() -> None:
    """Nothing of it is in the store; a given one is taken."""
    base = HashStore()
    replaced = Given(A)
    alone, other, given = (nodes_of(base, [read], static=False)[0] for read in (lambda: None, lambda: None, replaced))
    with pytest.raises(RuntimeError, match="no rendezvous yet"):
        _ = alone.secret
    for node in (alone, other, given):
        node.next_rendezvous()
    assert alone.secret != other.secret and given.secret == A
    assert all(alone.secret.value not in entry for entry in entries(base).values())
    replaced.secret = B
    given.next_rendezvous()
    assert given.secret == B


@BACKENDS
@pytest.mark.parametrize(
    ("first", "second", "got", "expected"),
    [
        (lambda: A, lambda: B, f"secret {B.name}", f"secret {A.name}"),
        (lambda: A, lambda: None, "no secret", f"secret {A.name}"),
        (lambda: None, lambda: B, f"secret {B.name}", "no secret"),
        (lambda: A, None, "TTP_TLS=False", f"secret {A.name}"),
    ],
)
def test_nodes_with_different_secrets_find_that_out_at_once(
    static: bool, first: Read | None, second: Read | None, got: str, expected: str
) -> None:
    """In one line, with both names and what to do."""
    base = HashStore()
    meets = base if static else PrefixStore("round0", base)
    JobSecret("run", first).compare(meets)
    with pytest.raises(OtherSecret) as raised:
        nodes_of(base, [first, second], static=static)[1].next_rendezvous()
    text = str(raised.value)
    assert f"got {got}, expected that of the nodes that have met for job 'run': {expected}. Give every node" in text
    assert "\n" not in text and "aaaa" not in text and "bbbb" not in text


def test_a_name_that_another_program_has_written_is_replaced() -> None:
    """Whatever text it is; the name of another secret keeps out an agent that comes, and none that is there."""
    store, secret = HashStore(), JobSecret("run", lambda: A)
    for name in ("", "garbage", "\x00" * 2000):
        store.set("ttp/secret/run", name)
        secret.compare(store)
        assert store.get("ttp/secret/run").decode() == A.name
    store.set("ttp/secret/run", B.name)
    with pytest.raises(OtherSecret):
        secret.compare(store)
    secret.met = True
    secret.compare(store)


def test_a_secret_that_was_replaced_is_the_next_attempts() -> None:
    """Its name takes the other's place; one that cannot be read any more stays as it is."""
    given, store = Given(A), HashStore()
    secret = JobSecret("run", given)
    secret.compare(store)
    assert not secret.read()
    given.secret = B
    assert secret.read() and secret.name == B.name
    secret.compare(store)
    assert store.get("ttp/secret/run").decode() == B.name
    given.error = "the file is gone"
    assert not secret.read() and secret.name == B.name
    given.error, given.secret = "", None
    assert not secret.read() and secret.choose() == (B, "-")


def test_a_secret_that_cannot_be_read_at_the_start_is_an_error() -> None:
    given = Given(None)
    given.error = "invalid TTP_SECRET_FILE"
    with pytest.raises(ConfigError, match="invalid TTP_SECRET_FILE"):
        JobSecret("run", given)


def config(place: Endpoint, nodes: int = 2, **more: str) -> LaunchConfig:
    quickly = {"is_host": "0", "last_call_timeout": "1", "join_timeout": "60", **more}
    return LaunchConfig(
        nodes, nodes, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint=str(place), rdzv_configs=quickly,
        local_addr="127.0.0.1",
    )  # fmt: skip


@pytest.mark.parametrize("read", [lambda: None, None], ids=["without a secret", "TTP_TLS=False"])
def test_several_nodes_without_a_secret_are_refused_where_one_is_required(read: Read | None) -> None:
    with pytest.raises(
        ConfigError, match=r"invalid TTP_REQUIRE_SECRET=True: got several nodes and .*--secret-file FILE"
    ):
        make_rendezvous(config(free_place()), secret=read, require_secret=True)
    make_rendezvous(config(free_place(), nodes=1), secret=read, require_secret=True)
    make_rendezvous(config(free_place()), secret=lambda: A, require_secret=True)


def test_several_nodes_without_a_secret_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with what it protects from and what to do; one node has nothing to agree on, and TTP_TLS=False has its own warning."""
    make_rendezvous(config(free_place()), secret=lambda: A)
    make_rendezvous(config(free_place(), nodes=1), secret=lambda: None)
    make_rendezvous(config(free_place()))
    assert not caplog.messages
    make_rendezvous(config(free_place()), secret=lambda: None)
    (line,) = caplog.messages
    assert "protects from accidents only" in line and "openssl rand" in line


class Creates:
    """What an attacker pickles: unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def place() -> Iterator[Endpoint]:
    """An endpoint with a store that any program can write into."""
    found = free_place()
    server = serve(found.host, found.port, found.host)
    yield found
    del server


def raw(place: Endpoint) -> TCPStore:
    return TCPStore(place.host, place.port, is_master=False, wait_for_workers=False)


@contextlib.contextmanager
def two_agents(place: Endpoint, *reads: Read | None) -> Iterator[list[FreshStoreRendezvous]]:
    """Real agents' rendezvous, with torch's handlers inside."""
    agents = [make_rendezvous(config(place), secret=read) for read in reads]
    yield agents
    for agent in agents:
        agent.shutdown()


def test_a_pickle_in_a_live_rendezvous_is_never_unpickled(
    place: Endpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agents go on as with a lost store, and meet again for the next attempt, where the first state has gone."""
    with two_agents(place, lambda: A, lambda: A) as agents:
        join_all(agents)
        evil = b64encode(pickle.dumps(Creates(tmp_path / "created"))).decode()
        raw(place).set("torch.rendezvous.job", evil)
        until(lambda: caplog.text.count("training continues, the next attempt uses another store") == 2)
        assert [agent.num_nodes_waiting() for agent in agents] == [0, 0]
        infos = join_all(agents)
        assert [info.world_size for info in infos] == [2, 2] and agents[0].job_store == agents[1].job_store
        assert agents[0].job_store.round_number == 1
        assert raw(place).get("torch.rendezvous.job").decode() == evil
    assert not (tmp_path / "created").exists()
    assert "the rendezvous' state is refused: got" in caplog.text and "without a seal" in caplog.text


def test_a_pickle_that_was_there_before_the_nodes_is_never_unpickled(place: Endpoint, tmp_path: Path) -> None:
    evil = b64encode(pickle.dumps(Creates(tmp_path / "created"))).decode()
    raw(place).set("torch.rendezvous.job", evil)
    with two_agents(place, lambda: A, lambda: A) as agents:
        assert [info.world_size for info in join_all(agents)] == [2, 2]
    assert not (tmp_path / "created").exists()


def test_a_state_in_another_encoding_is_as_one_without_a_seal(place: Endpoint) -> None:
    raw(place).set("torch.rendezvous.job", "x")
    with two_agents(place, lambda: A, lambda: A) as agents:
        assert [info.world_size for info in join_all(agents)] == [2, 2]


def test_without_a_secret_torch_unpickles_what_anybody_has_written(place: Endpoint, tmp_path: Path) -> None:
    """That is the hole; the warning at the start is about it."""
    evil = b64encode(pickle.dumps(Creates(tmp_path / "created"))).decode()
    raw(place).set("torch.rendezvous.job", evil)
    agent = make_rendezvous(config(place, join_timeout="30"), secret=lambda: None)
    with pytest.raises(Exception):  # noqa: B017  # whatever torch makes of such an object
        agent.next_rendezvous()
    assert (tmp_path / "created").exists()


@pytest.mark.parametrize("error", [ValueError("invalid literal for int()"), RendezvousStateError("not base64")])
def test_what_torch_cannot_read_in_the_store_is_as_a_lost_store(
    error: Exception, place: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program has written there, under one of torch's own keys: the agent joins again."""
    made: list[Handler] = []

    class Garbled(Handler):
        def __init__(self, place: Endpoint, epoch: int, nodes: int, moved: bool) -> None:
            super().__init__(place)
            self.joined.set()
            made.append(self)

        def next_rendezvous(self) -> RendezvousInfo:
            if len(made) == 1:
                raise error
            return super().next_rendezvous()

    rendezvous = FailoverRendezvous(Stores((place,), hosting=False), Garbled, "job", join_timeout_s=60.0)
    assert rendezvous.next_rendezvous().world_size == 1 and len(made) == 2
    assert f"the rendezvous at {place} failed: {error}" in caplog.text
    rendezvous.shutdown()


def test_a_stranger_moves_no_agent_and_ends_no_job(place: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Not by an epoch, a reason why the job is over, a departure, or a success."""
    with two_agents(place, lambda: A, lambda: A) as agents:
        join_all(agents)
        store = raw(place)
        departures.publish_over(store, "job", "forged")
        departures.publish_departure(store, "job", "forged")
        departures.publish_success(store, "job", "forged")
        store.set(epoch_key("job"), "9")
        store.set("ttp/secret/job", B.name)
        for agent in agents:
            _failover(agent)._stores._windows[place]._client = None  # a new connection compares the secrets' names
        before = [agent.num_nodes_waiting() for agent in agents]
        until(lambda: caplog.text.count("is refused, and counts as absent") >= 3)
        assert before == [0, 0] == [agent.num_nodes_waiting() for agent in agents]
        assert [agent.failed_elsewhere() for agent in agents] == ["", ""]
        assert [info.world_size for info in join_all(agents)] == [2, 2]
        ours = _failover(agents[0])._stores.secret.sealed(store, str(place))
        assert {agent.node for agent in read_agents(ours, "job")} == {"127.0.0.1"}


def _failover(agent: FreshStoreRendezvous) -> FailoverRendezvous:
    assert isinstance(agent._inner, FailoverRendezvous)
    return agent._inner


def test_the_state_of_nodes_that_meet_in_a_file_is_sealed_too(tmp_path: Path) -> None:
    """And a node with another secret ends before it writes there."""

    def meets_in_a_file(read: Read) -> FreshStoreRendezvous:
        shared = LaunchConfig(
            1, 2, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint=str(tmp_path / "store"),
            rdzv_configs={"store_type": "file", "last_call_timeout": "1"}, local_addr="127.0.0.1",
        )  # fmt: skip
        return make_rendezvous(shared, secret=read)

    first = meets_in_a_file(lambda: A)
    with pytest.raises(OtherSecret, match=f"got secret {B.name}, expected .* secret {A.name}"):
        meets_in_a_file(lambda: B)
    store = FileStore(str(tmp_path / "store"))
    store.set("torch.rendezvous.job", b64encode(pickle.dumps(Creates(tmp_path / "created"))).decode())
    with pytest.raises(StateRefused, match="without a seal"):
        first.next_rendezvous()
    assert not (tmp_path / "created").exists()


def test_an_answer_that_another_program_gives_is_not_read() -> None:
    """The ranks would meet in its store."""
    base = HashStore()
    node_0, node_1 = nodes_of(base, [lambda: A, lambda: A], static=False)
    joining = threading.Thread(target=node_1.next_rendezvous)
    joining.start()
    key = "round0/ttp/job_store/next_round/1"
    until(lambda: base.check([key]))
    (ticket, *_) = json.loads(base.get(key).split(b" ", 2)[2])
    base.set(f"round0/ttp/job_store/{ticket}", "198.51.100.1 1 0 -")
    node_0.next_rendezvous()
    joining.join(30)
    assert node_1.job_store == node_0.job_store


def test_an_entry_of_another_endpoint_is_refused(place: Endpoint) -> None:
    """What ended a rendezvous elsewhere, or moved it, does not here."""
    secret, store = JobSecret("job", lambda: A), raw(place)
    departures.publish_over(secret.sealed(store, "elsewhere:1"), "job", "replayed")
    assert departures.over(secret.sealed(store, "elsewhere:1"), "job") == "replayed"
    assert departures.over(secret.sealed(store, str(place)), "job") == ""


@pytest.mark.parametrize("spare", [False, True], ids=["node", "spare node"])
def test_an_agent_with_another_secret_ends_before_it_joins(place: Endpoint, spare: bool) -> None:
    """And the others never see it; a spare node does not wait for hours first."""
    with two_agents(place, lambda: A, lambda: A) as agents:
        joins: list[RendezvousInfo] = []
        first = threading.Thread(target=lambda: joins.append(agents[0].next_rendezvous()))
        first.start()
        until(lambda: raw(place).check(["torch.rendezvous.job"]))
        wrong = make_rendezvous(config(place), secret=lambda: B, spare_node=spare)
        with pytest.raises(OtherSecret, match=f"got secret {B.name}, expected .*'job': secret {A.name}"):
            wrong.next_rendezvous()
        joins.append(agents[1].next_rendezvous())
        first.join(60)
        assert [info.world_size for info in joins] == [2, 2]


def test_nodes_meet_again_with_a_secret_that_was_replaced(place: Endpoint) -> None:
    """Also where one of them reads the new one later than the other."""
    given = Given(A), Given(A)
    with two_agents(place, *given) as agents:
        join_all(agents)
        given[0].secret = B
        joining = [threading.Thread(target=agent.next_rendezvous) for agent in agents]
        for thread in joining:
            thread.start()
        until(lambda: raw(place).get("ttp/secret/job").decode() == B.name)
        assert all(thread.is_alive() for thread in joining)
        given[1].secret = B
        for thread in joining:
            thread.join(60)
        assert [agent.secret for agent in agents] == [B, B] and agents[0].job_store == agents[1].job_store


def test_a_ticket_that_is_forged_or_was_used_is_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    """An attempt would begin without its node."""
    base, secret, tickets = HashStore(), JobSecret("run", lambda: A), static_join.Collected(0.0)
    store = secret.sealed(base, "meeting")
    used = []
    for ticket in ("first", "second"):
        store.set("ttp/tickets/1", ticket)
        used.append(base.get("ttp/tickets/1").decode())
        assert tickets.collect(store, 2, str) == [ticket]
    for forged in (*used, "forged"):
        base.set("ttp/tickets/1", forged)
        with pytest.raises(RendezvousTimeoutError, match="nodes 1 of 2 have not joined"):
            tickets.collect(store, 2, str)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["ttp/tickets/1"]


@BACKENDS
def test_the_ranks_of_an_attempt_are_sealed(static: bool) -> None:
    """torch's agents read there which ranks they have: an entry of an earlier attempt, or of a stranger, is absent."""
    base = HashStore()
    nodes = nodes_of(base, [lambda: A, lambda: A], static=static)
    first = join_all(nodes)
    first[0].store.set("torchelastic/assigned_ranks/1", "[1, 2, 1, 2]")
    assert first[1].store.get("torchelastic/assigned_ranks/1") == b"[1, 2, 1, 2]"
    earlier = next(entry for key, entry in entries(base).items() if key.endswith("assigned_ranks/1"))
    second = join_all(nodes)
    for forged in (earlier.decode(), "[0, 9, 0, 9]"):
        second[0].store.base.set("torchelastic/assigned_ranks/1", forged)  # type: ignore[attr-defined]
        assert not second[1].store.check(["torchelastic/assigned_ranks/1"])
