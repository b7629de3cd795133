"""A node's copy keeper as a process of its own, with the test as its agent and its ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import ttp
from tests.unit.copies.conftest import HOST, SECRET
from tests.unit.copies.material import described
from tests.waiting import LONG_S, until
from ttp.checkpoint.format.durable import inodes_in
from ttp.copies.copy_memory import START_S, CopyMemory
from ttp.copies.keeper import NICE, listen
from ttp.copies.node_limits import Limit
from ttp.errors import ConfigError
from ttp.identity.own import socket_name
from ttp.launch.attempts import copies as agent_copies
from ttp.launch.attempts.copies import Copies, SavedCopies


class Node:
    """An agent, and the ranks that the test plays; each has one group of the job's two."""

    def __init__(self, store: HashStore, node: int, nodes: int, folder: Path) -> None:
        self.copies = Copies()
        self.store, self.node, self.nodes, self.folder = store, node, nodes, folder
        self.attempt = -1
        self.passed_over: dict[str, int] = {}

    def begin(self, attempt: int, ranks: list[int], secured: bool = False, store: HashStore | None = None) -> Any:
        self.attempt, self.store = attempt, store or self.store
        return self.copies.begin(
            f"job/{attempt}", attempt, self.store, self.node, self.nodes, HOST, SECRET if secured else None, ranks
        )

    def facts(self) -> dict[str, Any]:
        return {
            "layout": {}, "expected": {"model.x": [4], "model.y": [2]}, "param_names": [["x", "y"]],
            "directories": [str(self.folder)], "passed_over": self.passed_over, "sign_key": "", "verify_key": "",
        }  # fmt: skip

    def attach(self, rank: int, groups: tuple[str, ...], use: str = "copies") -> CopyMemory:
        found: list[Any] = []

        def ask() -> None:
            try:
                description = described(self.attempt, rank, self.facts(), groups)
                found.append(CopyMemory(self.copies.address, description, use))
            except BaseException as error:
                found.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: self.look() or found, "memory of a keeper, which imports torch first", START_S)
        asking.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]  # type: ignore[no-any-return]

    def look(self) -> bool:
        """Look as the agent does in each round; False, for conditions."""
        self.copies.look(None)
        return False

    def kill_keeper(self) -> None:
        keeper = self.copies._process
        assert keeper is not None
        os.kill(keeper.pid, signal.SIGKILL)
        keeper.wait()


def values(step: int, groups: tuple[str, ...]) -> list[torch.Tensor]:
    return [torch.full((4 if group == "a" else 2,), float(step)) for group in groups]


def state(step: int) -> bytes:
    return json.dumps(
        {"state": {"optimizer": {"param_groups": [{"lr": 0.5}]}, "trainer": {"seen": step}}, "record": None}
    ).encode()


def copy(memory: CopyMemory, step: int, sequence: int, groups: tuple[str, ...], send: bool = False) -> dict[str, Any]:
    """Take a copy; return what the keeper says of it."""
    memory.take(sequence % 2, step, sequence, state(step), values(step, groups))
    memory.say(
        {"do": "copied", "slot": sequence % 2, "step": step, "sequence": sequence, "send": send, "within_s": 0.0}
    )
    answer = memory.next_message(LONG_S)
    assert answer is not None
    return answer


def check(saved: SavedCopies | None, step: int) -> None:
    """The step is saved, with the values and the state of that step."""
    assert saved is not None
    assert saved.step == step
    found = ttp.open_checkpoint(saved.path)
    weights = found.weights()
    assert (found.step, found.state) == (step, {"seen": step})
    assert torch.equal(weights["x"], torch.full((4,), float(step)))
    assert torch.equal(weights["y"], torch.full((2,), float(step)))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    of = Node(HashStore(), 0, 1, tmp_path)
    try:
        assert of.begin(0, [0, 1]) is None
        yield of
    finally:
        of.copies.close()


def test_a_step_that_only_copies_have_is_saved_before_the_next_attempt_and_only_once(node: Node) -> None:
    first, second = node.attach(0, ("a",)), node.attach(1, ("b",))
    for step in (3, 4):
        assert copy(first, step, step - 2, ("a",)) == {"safe": step, "why": ""}
    assert copy(second, 3, 1, ("b",)) == {"safe": 3, "why": ""}
    first.close()
    second.close()
    check(node.begin(1, [0, 1], store=HashStore()), 3)
    assert [p.name for p in node.folder.iterdir() if "tmp" in p.name] == []
    assert node.begin(2, [0, 1], store=HashStore()) is None


def test_a_copy_whose_rank_died_before_it_said_so_is_not_judged_by_the_checksum_of_the_one_before(node: Node) -> None:
    first, second = node.attach(0, ("a",)), node.attach(1, ("b",))
    for step in (3, 4):
        assert copy(first, step, step - 2, ("a",))["why"] == copy(second, step, step - 2, ("b",))["why"] == ""
    for memory, groups in ((first, ("a",)), (second, ("b",))):
        memory.take(1, 5, 3, state(5), values(5, groups))
        memory.close()
    check(node.begin(1, [0, 1], store=HashStore()), 5)


def test_a_keeper_that_was_killed_costs_no_copy(node: Node) -> None:
    first = node.attach(0, ("a", "b"))
    assert copy(first, 3, 1, ("a", "b"))["why"] == ""
    node.kill_keeper()
    with pytest.raises(OSError, match="the copy keeper was lost"):
        first.next_message(LONG_S)
    # its agent has not looked yet: the next attempt begins at once
    check(node.begin(1, [0], store=HashStore()), 3)


@pytest.mark.long
def test_a_rank_that_has_lost_its_keeper_is_given_the_same_memory_and_its_older_copy_stays(node: Node) -> None:
    first = node.attach(0, ("a", "b"))
    assert copy(first, 3, 1, ("a", "b"))["why"] == ""
    node.kill_keeper()
    with pytest.raises(OSError, match="the copy keeper was lost"):
        first.next_message(LONG_S)
    with pytest.raises(OSError, match="there is no copy keeper"):
        first.say({})
    with pytest.raises(OSError, match="there is no copy keeper"):
        first.next_message(0.0)
    again = threading.Thread(target=first.take, args=(0, 4, 2, state(4), values(4, ("a", "b"))))
    again.start()
    until(lambda: node.look() or not again.is_alive())
    again.join()
    offers = node.copies._order({"do": "offers"})
    assert [(offer["step"], offer["slot"]) for offer in offers["offers"]] == [(4, 0), (3, 1)]
    first.close()


def test_a_copy_that_was_changed_in_memory_is_left_out_and_the_one_before_is_saved(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    first = node.attach(0, ("a", "b"))
    for step in (3, 4):
        copy(first, step, step - 2, ("a", "b"))
    assert first._region is not None
    first._region.data(0)[1] ^= 1
    check(node.begin(1, [0], store=HashStore()), 3)
    assert "the copy of rank 0 at step 4 is not what it was when it was taken" in caplog.text
    first.close()


@pytest.mark.long
def test_only_the_damaged_copy_of_a_node_is_left_out(node: Node) -> None:
    first, second, third = node.attach(0, ("a",)), node.attach(1, ("a",)), node.attach(2, ("b",))
    for memory, groups in ((first, ("a",)), (second, ("a",)), (third, ("b",))):
        copy(memory, 3, 1, groups)
    assert first._region is not None
    first._region.data(1)[0] ^= 1
    check(node.begin(1, [0, 1, 2], store=HashStore()), 3)
    for memory in (first, second, third):
        memory.close()


@pytest.mark.long
def test_checksums_of_an_earlier_attempt_do_not_damn_its_successors_copies(node: Node) -> None:
    first = node.attach(0, ("a", "b"))
    copy(first, 3, 1, ("a", "b"))
    first.close()
    check(node.begin(1, [0], store=HashStore()), 3)
    again = node.attach(0, ("a", "b"))
    again.take(1, 5, 1, state(5), values(5, ("a", "b")))
    again.close()  # before its keeper knows of it
    check(node.begin(2, [0], store=HashStore()), 5)


@pytest.mark.long
def test_groups_that_only_an_earlier_attempt_had_are_not_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node.attach(0, ("a", "b"))
    copy(first, 3, 1, ("a", "b"))
    first.close()
    check(node.begin(1, [0, 1], store=HashStore()), 3)
    node.attempt = 2
    second = node.attach(1, ("a", "b"))
    copy(second, 4, 1, ("a", "b"))
    of_earlier = {"groups": {"1": ["a", "of another world"], "2": ["a", "b"]}}
    real = node.copies._order

    def order(request: Any) -> dict[str, Any]:
        answer = real(request)
        return answer | of_earlier if request["do"] == "offers" else answer

    monkeypatch.setattr(node.copies, "_order", order)
    check(node.begin(3, [0, 1], store=HashStore()), 4)
    second.close()


@pytest.mark.long
def test_a_directory_that_cannot_be_written_gives_way_to_the_next_one(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    bad, good = tmp_path / "file", tmp_path / "good"
    good.mkdir()
    facts = node.facts() | {"directories": [str(bad), str(good)]}
    node.facts = lambda: facts  # type: ignore[method-assign]
    first = node.attach(0, ("a", "b"))
    copy(first, 3, 1, ("a", "b"))
    saved = node.begin(1, [0], store=HashStore())
    check(saved, 3)
    assert Path(saved.path).parent == good
    assert "step 3 could not be saved from copies in" in caplog.text
    first.close()


@pytest.mark.parametrize("passed_over", [True, False])
def test_copies_are_dropped_for_a_newer_checkpoint_of_this_run_alone(node: Node, passed_over: bool) -> None:
    """One that the job has not resumed from may be a name without files. One of the copies' own step that another run has written gives way."""
    other = node.attach(0, ("a", "b"))
    other.take(1, 3, 1, state(3), values(7, ("a", "b")))
    other.close()
    assert node.begin(1, [0], store=HashStore()) is not None
    (node.folder / "iter_0000005").mkdir()
    node.passed_over = inodes_in([str(node.folder)]) if passed_over else {}
    first = node.attach(0, ("a", "b"))
    copy(first, 3, 1, ("a", "b"))
    saved = node.begin(2, [0], store=HashStore())
    assert (saved is not None) is passed_over
    if passed_over:
        check(saved, 3)
    first.close()


@pytest.mark.long
def test_memory_of_ranks_that_are_not_here_any_more_is_given_back(node: Node) -> None:
    for rank in (0, 1):
        node.attach(rank, ("a", "b")).close()
    assert set(node.copies._owner.all()) == {"rank 0", "rank 1"}
    node.begin(1, [1], store=HashStore())
    assert set(node.copies._owner.all()) == {"rank 1"}
    assert [o["name"] for o in node.copies._order({"do": "offers"})["offers"]] == []


@pytest.mark.long
def test_a_rank_without_room_is_refused_with_the_figures(node: Node) -> None:
    node.copies._owner._limits = [Limit(1, 1, "the test")]
    with pytest.raises(ConfigError, match=r"^copies in memory: got 16\.0 KiB for rank 0 .*expected at most 0 B \(the"):
        node.attach(0, ("a", "b"))


def save_request(node: Node, rank: int, ranks: int, step: int) -> dict[str, Any]:
    return {
        "do": "save", "step": step, "rank": rank, "ranks": ranks, "publishes": rank == 0, "directory": str(node.folder),
        "cause": "periodic", "term": 1, "tmp_name": f"iter_{step:07d}_tmp_periodic_background_0_1",
    }  # fmt: skip


@pytest.mark.long
def test_a_share_is_not_written_of_another_step_than_the_one_that_was_asked_for(node: Node) -> None:
    """The next attempt's rank has begun to use its memory before the keeper came to the save of the one before."""
    saving = node.attach(0, ("a", "b"), "save")
    saving.take(0, 8, 2, state(8), values(8, ("a", "b")))
    saving.say(save_request(node, 0, 1, 7))
    answer = saving.next_message(LONG_S)
    assert answer is not None and answer["path"] == ""
    assert answer["error"] == "the copy of save of rank 0 at step 7 is gone"
    assert list(node.folder.glob("iter_*")) == []
    saving.close()


def session_nice(pid: int) -> str:
    """Return what each session has its share of the CPU by; as if by default where the kernel has no such thing."""
    session = Path(f"/proc/{pid}/autogroup")
    return session.read_text().partition(" nice ")[2].strip() if session.exists() else "0"


def test_a_keeper_has_a_low_priority_and_its_session_only_while_a_save_is_written(node: Node) -> None:
    """Ranks wait for copies, and for no save."""
    saving = node.attach(0, ("a", "b"), "save")
    assert node.copies._process is not None
    keeper = node.copies._process.pid
    assert os.getpriority(os.PRIO_PROCESS, keeper) == NICE and session_nice(keeper) == "0"
    saving.take(0, 7, 1, state(7), values(7, ("a", "b")))
    saving.say(save_request(node, 0, 2, 7))  # rank 1's share does not come: the save waits for it
    end = time.monotonic() + LONG_S
    while Path("/proc/self/autogroup").exists() and session_nice(keeper) != str(NICE):
        assert time.monotonic() < end
    saving.close()
    node.begin(1, [0, 1], store=HashStore())  # the save ends with its attempt
    until(lambda: session_nice(keeper) == "0", "the session's share as it was")


@pytest.mark.long
def test_what_a_rank_saves_is_published_by_the_keeper_and_not_offered(node: Node) -> None:
    saving = [node.attach(rank, (group,), "save") for rank, group in enumerate("ab")]
    for rank, memory in reversed(list(enumerate(saving))):
        memory.take(0, 7, 1, state(7), values(7, ("ab"[rank],)))
        memory.say(save_request(node, rank, 2, 7))
    answers = [memory.next_message(LONG_S) for memory in saving]
    path = str(node.folder / "iter_0000007")
    assert answers == [{"saved": 7, "path": path, "error": ""}, {"saved": 7, "path": "", "error": ""}]
    check(SavedCopies(7, path, 1, 0.0), 7)
    assert node.copies._order({"do": "offers"})["offers"] == []
    for memory in saving:
        memory.close()


def both(first: Any, second: Any) -> list[Any]:
    """Call two at once, as two agents do; return what they return."""
    found: list[Any] = [None, None]

    def call(place: int, what: Any) -> None:
        found[place] = what()

    threads = [threading.Thread(target=call, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.long
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
def test_the_copy_of_a_lost_node_is_saved_by_the_next_one_also_after_that_ones_keeper_was_killed(
    tmp_path: Path, secured: bool
) -> None:
    store = HashStore()
    nodes = [Node(store, number, 2, tmp_path) for number in (0, 1)]
    replacement = Node(store, 0, 2, tmp_path)
    try:
        for number, of in enumerate(nodes):
            of.begin(0, [number], secured)
        lost, other = nodes[0].attach(0, ("a",)), nodes[1].attach(1, ("b",))
        until(lambda: not any(of.look() for of in nodes) and all(of.copies._peer for of in nodes))
        assert copy(lost, 3, 1, ("a",), send=True) == {"safe": 3, "why": ""}
        nodes[1].kill_keeper()
        with pytest.raises(OSError, match="the copy keeper was lost"):
            other.next_message(LONG_S)
        again = threading.Thread(target=other.take, args=(1, 3, 1, state(3), values(3, ("b",))))
        again.start()
        # it gives memory before it has begun, and listens from then on
        until(lambda: nodes[1].look() or not (again.is_alive() or nodes[1].copies._begins))
        again.join()
        # the connection broke with the keeper; the next one listens where that did
        answers = [copy(lost, step, step - 2, ("a",), send=True) for step in (4, 5)]
        assert answers[0]["why"].startswith("the next node has not got it") or answers[0]["why"] == ""
        assert answers[1] == {"safe": 5, "why": ""}
        other.take(0, 4, 2, state(4), values(4, ("b",)))
        other.take(1, 5, 3, state(5), values(5, ("b",)))
        nodes[0].copies.close()
        after = HashStore()
        saved = both(lambda: replacement.begin(1, [0], secured, after), lambda: nodes[1].begin(1, [1], secured, after))
        check(saved[0], 5)
        assert (saved[0].step, saved[0].path) == (saved[1].step, saved[1].path)
        assert set(nodes[1].copies._owner.all()) == {"rank 1"}, "what came from another node is given back"
        lost.close()
        other.close()
    finally:
        for of in (*nodes, replacement):
            of.copies.close()


@pytest.mark.long
def test_a_keeper_listens_where_the_one_before_did_or_elsewhere_when_that_is_taken() -> None:
    with listen(HOST, 0) as before:
        port = before.getsockname()[1]
        with listen(HOST, port) as elsewhere:
            assert elsewhere.getsockname()[1] != port
    with listen(HOST, port) as again:
        assert again.getsockname()[1] == port
    with listen("::1", 0) as wide:
        assert wide.getsockname()[0] == "::1"


@pytest.mark.long
def test_an_agent_does_not_wait_for_a_keeper_that_still_starts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports torch first, on a slow disk for a minute; the ranks need their agent meanwhile."""

    def starts(server: object, channel: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], stdin=channel.fileno())

    monkeypatch.setattr(Copies, "_run", staticmethod(starts))
    monkeypatch.setattr(agent_copies, "ORDER_S", 1.0)
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(socket_name(node.copies.address))
        for _ in range(2):
            node.look()
            assert node.copies._process is not None and node.copies._process.poll() is None


def test_a_keeper_ends_with_its_agent(node: Node) -> None:
    node.attach(0, ("a",)).close()
    assert node.copies._process is not None
    assert node.copies._orders is not None
    node.copies._orders.close()
    until(lambda: node.copies._process is not None and node.copies._process.poll() is not None)
    assert node.copies._process.poll() == 0


@pytest.mark.parametrize("answers", [True, False], ids=["all nodes answer", "a node is lost"])
def test_memory_of_other_nodes_is_kept_until_all_nodes_have_come_to_an_end_with_it(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node that is lost between two attempts takes along what this one has of an earlier loss."""

    class Answers:
        def set(self, key: str, value: str) -> None: ...

        def check(self, keys: list[str]) -> bool:
            return answers

        def get(self, key: str) -> bytes:
            return b'{"offers": [], "groups": {}, "directories": [], "newest": 0}'

    monkeypatch.setattr(agent_copies, "OFFERS_S", 0.0)
    agent = Copies()
    monkeypatch.setattr(agent, "_start", lambda server: None)
    agent._owner.obtain("rank 5 of another node", 4096, 4096)
    agent.begin("job/1", 1, cast(Any, Answers()), node=0, nodes=2, host="127.0.0.1", secret=None, ranks=[0])
    assert list(agent._owner.all()) == ([] if answers else ["rank 5 of another node"])
    agent.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_node_gets_no_memory(node: Node) -> None:
    node.attach(0, ("a",)).close()
    asks = """if True:
        import json, os, socket, struct, sys
        body = json.dumps({"rank": 0, "use": "copies", "nbytes": int(sys.argv[2]), "written": 0}).encode()
        os.setgid(65534); os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect("\\0" + sys.argv[1][1:])
            try:  # it may be refused before it has asked
                channel.sendall(struct.pack("!Q", len(body)) + body)
                print(len(channel.recv(1)))
            except (BrokenPipeError, ConnectionResetError):
                print(0)
    """
    command = [sys.executable, "-c", asks, node.copies.address, "4096"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG_S)
    assert done.stdout.strip() == "0"
