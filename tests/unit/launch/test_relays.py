"""A node's relay, attempt after attempt: which jobs have one, what becomes of the one before, and of one that cannot be had."""

from __future__ import annotations

import asyncio
import errno
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ttp.launch.attempts.relays import Relays
from ttp.launch.links import relay as relay_module
from ttp.launch.links.relay import Relay

MakeRelays = Callable[..., Relays]
RANKS = (3, 4)
WARNING = "the ranks of this node connect to controllers themselves"


@pytest.fixture
def new_relays() -> Iterator[MakeRelays]:
    """Make relays, close them at the end, and see that no thread remains."""
    before = set(threading.enumerate())
    made: list[Relays] = []

    def make(asked: bool | None = None, lease_s: float = 3.0) -> Relays:
        made.append(Relays(asked, lambda world_size: lease_s))
        return made[-1]

    yield make
    for relays in made:
        relays.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "ttp-relay"]


def listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(path)
        except OSError:
            return False
        return True


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("asked", "world_size", "has_one"),
    [
        (None, 2, False),
        (None, 2000, False),
        (None, 2001, True),
        (None, 10_000, True),
        (True, 2, True),
        (True, 10_000, True),
        (False, 2, False),
        (False, 2001, False),
        (False, 10_000, False),
    ],
)
def test_a_large_job_has_relays_and_a_small_one_that_asks_for_them(
    new_relays: MakeRelays, caplog: pytest.LogCaptureFixture, asked: bool | None, world_size: int, has_one: bool
) -> None:
    path = new_relays(asked).begin(RANKS, world_size)
    assert (bool(path) and listens(path)) == has_one
    assert (path == "") != has_one
    assert warnings(caplog) == []


def test_a_node_without_ranks_has_none_nor_the_one_of_the_attempt_before(new_relays: MakeRelays) -> None:
    relays = new_relays(True)
    assert relays.begin((), 10_000) == ""
    path = relays.begin(RANKS, 10_000)
    assert listens(path)
    assert relays.begin((), 10_000) == ""
    assert not listens(path)


def test_a_job_that_has_become_small_has_none_any_more(new_relays: MakeRelays) -> None:
    """An elastic job: the attempt with more ranks had one."""
    relays = new_relays()
    path = relays.begin(RANKS, 2001)
    assert listens(path)
    assert relays.begin(RANKS, 2000) == ""
    assert not listens(path)


def test_each_attempt_has_another_socket_and_the_earlier_one_ends(new_relays: MakeRelays) -> None:
    """A process that remains of the earlier attempt comes to no relay of this one."""
    relays = new_relays(True)
    paths: list[str] = []
    for _ in range(4):
        paths.append(relays.begin(RANKS, 2))
        assert [listens(path) for path in paths] == [False] * (len(paths) - 1) + [True]
    assert len(set(paths)) == len(paths)
    assert len({Path(path).parent for path in paths}) == 1, "the folder is made once"


def test_a_relay_is_of_the_attempts_ranks_and_the_jobs_lease(new_relays: MakeRelays) -> None:
    """It shows often enough that it runs: three times while a rank waits for that."""
    relays = new_relays(True, lease_s=6.0)
    for ranks in ((3, 4), [7]):
        relays.begin(ranks, 8)
        assert relays._relay is not None
        assert relays._relay._ranks == set(ranks)
        assert relays._relay._alive_s == pytest.approx(0.5)


def test_this_user_alone_can_come_to_the_socket_and_its_folder_goes_with_the_job(new_relays: MakeRelays) -> None:
    relays = new_relays(True)
    path = Path(relays.begin(RANKS, 2))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    relays.close()
    assert not listens(str(path)) and not path.parent.exists()


def test_relays_that_never_had_one_close(new_relays: MakeRelays) -> None:
    """A job that fails before its first attempt, and one without relays."""
    new_relays().close()
    refused = new_relays(False)
    refused.begin(RANKS, 2)
    refused.close()


def test_a_folder_that_cannot_be_made_is_a_warning(
    new_relays: MakeRelays, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next attempt has its relay, if there is a place for it then."""
    relays = new_relays(True)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
        assert relays.begin(RANKS, 2) == ""
    (line,) = warnings(caplog)
    assert WARNING in line and "No such file or directory" in line and "\n" not in line
    assert listens(relays.begin(RANKS, 2))


def test_a_path_that_is_too_long_for_a_socket_is_a_warning(
    new_relays: MakeRelays, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TMPDIR may be anywhere; the folder that was made there is removed all the same."""
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    relays = new_relays(True)
    assert relays.begin(RANKS, 2) == ""
    (line,) = warnings(caplog)
    assert WARNING in line and "\n" not in line
    relays.close()
    assert list(deep.iterdir()) == []


def test_a_relay_that_does_not_listen_in_time_is_a_warning(
    new_relays: MakeRelays, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine. Its thread does not remain."""
    listen, close, given_up = Relay._listen, Relay.close, threading.Event()

    async def listen_late(relay: Relay) -> None:
        while not given_up.is_set():
            await asyncio.sleep(0.005)
        await listen(relay)

    def give_up(relay: Relay) -> None:
        given_up.set()
        close(relay)

    relays = new_relays(True)
    with monkeypatch.context() as busy:
        busy.setattr(relay_module, "START_S", 0.01)
        busy.setattr(Relay, "_listen", listen_late)
        busy.setattr(Relay, "close", give_up)
        assert relays.begin(RANKS, 2) == ""
    assert [WARNING in line for line in warnings(caplog)] == [True]
    assert "ttp-relay" not in {thread.name for thread in threading.enumerate()}
    assert listens(relays.begin(RANKS, 2))


def _no_files() -> asyncio.AbstractEventLoop:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_relay_that_cannot_be_made_is_a_warning(
    new_relays: MakeRelays, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays = new_relays(True)
    with monkeypatch.context() as full:
        full.setattr(asyncio, "new_event_loop", _no_files)
        assert relays.begin(RANKS, 2) == ""
    (line,) = warnings(caplog)
    assert WARNING in line and "Too many open files" in line
    assert listens(relays.begin(RANKS, 2))


def failing(error: Exception) -> Callable[[Relay], None]:
    """Return a start that fails when the relay listens already: what it has begun must be ended."""
    start = Relay.start

    def fail(relay: Relay) -> None:
        start(relay)
        raise error

    return fail


@pytest.mark.parametrize("error", [OSError("no socket"), RuntimeError("no port"), TimeoutError("too late")], ids=repr)
def test_a_relay_whose_start_fails_ends_and_is_a_warning(
    new_relays: MakeRelays, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The attempt begins without it, and the next one has another."""
    ended: list[Path] = []
    close = Relay.close

    def note(relay: Relay) -> None:
        ended.append(relay.path)
        close(relay)

    monkeypatch.setattr(Relay, "close", note)
    relays = new_relays(True)
    with monkeypatch.context() as broken:
        broken.setattr(Relay, "start", failing(error))
        assert relays.begin(RANKS, 2) == ""
    (line,) = warnings(caplog)
    assert WARNING in line and str(error) in line
    assert len(ended) == 1 and not listens(str(ended[0]))
    path = relays.begin(RANKS, 2)
    assert listens(path) and path != str(ended[0])
    relays.close()
    assert [str(each) for each in ended[1:]] == [path], "each is closed once"


def test_an_error_that_is_a_bug_is_not_hidden(new_relays: MakeRelays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Relay, "start", failing(KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        new_relays(True).begin(RANKS, 2)
