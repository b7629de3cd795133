"""The agent's socket: which process gets which certificate."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until
from ttp.fork_server import frames
from ttp.identity.authority import Authority
from ttp.identity.issuer import Issuer, belongs_to
from ttp.identity.own import ask, socket_name
from ttp.identity.role import Identity, Role
from ttp.identity.secret import make_secret
from ttp.proto.transport import certified

JOB = "job/0"
ASKS = """
import json, sys
from ttp.identity.own import ask, socket_name
from ttp.identity.role import Identity, Role
try:
    ask(sys.argv[1], Identity("job/0", Role(sys.argv[2]), tuple(json.loads(sys.argv[3])), int(sys.argv[4])))
    print("given")
except ValueError as error:
    print(error)
"""


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer("host")
    made.begin(Authority(make_secret(), JOB), range(1, 100))
    yield made
    made.close()
    until(lambda: made.address not in Path("/proc/net/unix").read_text(), "the last answer's end")


def asked_by_another_process(issuer: Issuer, role: Role, ranks: list[int], term: int = 0) -> str:
    """Have a process ask that is neither a worker nor below one, in a session of its own."""
    command = [sys.executable, "-c", ASKS, issuer.address, role.value, json.dumps(ranks), str(term)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    return done.stdout.strip()


def names_of(certificate: bytes) -> list[bytes]:
    from cryptography import x509

    found = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [name.encode() for name in found.value.get_values_for_type(x509.UniformResourceIdentifier)]


def test_a_worker_gets_its_ranks_certificate(issuer: Issuer) -> None:
    issuer.workers({2: os.getpid(), 5: 1})
    issued = ask(issuer.address, Identity(JOB, Role.RANK, (2,)))
    assert certified(names_of(issued.certificate)) == Identity(JOB, Role.RANK, (2,), node="host")


def test_a_worker_does_not_get_another_ranks_certificate(issuer: Issuer) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        issuer.workers({2: os.getpid(), 5: sleeper.pid})
        with pytest.raises(ValueError, match=r"is not rank 5's worker"):
            ask(issuer.address, Identity(JOB, Role.RANK, (5,)))
        sleeper.kill()


@pytest.mark.parametrize("ranks", [(), (9,), (2, 5)])
def test_ranks_of_other_nodes_and_several_at_once_are_refused(issuer: Issuer, ranks: tuple[int, ...]) -> None:
    issuer.workers({2: os.getpid(), 5: os.getpid()})
    with pytest.raises(ValueError, match=r"expected one of this node's \[2, 5\]"):
        ask(issuer.address, Identity(JOB, Role.RANK, ranks))


def test_a_process_below_a_worker_gets_its_certificate_and_one_beside_it_does_not(issuer: Issuer) -> None:
    issuer.workers({0: os.getpid()})
    assert asked_by_another_process(issuer, Role.RANK, [0]) == "given"  # this one is below
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as worker:
        issuer.workers({0: worker.pid})
        assert "is not rank 0's worker" in asked_by_another_process(issuer, Role.RANK, [0])
        worker.kill()


def test_a_process_in_a_workers_session_is_its_own_though_its_parent_has_ended() -> None:
    leaves = "import os, sys\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True); sys.stdin.read()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {leaves!r}]); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        orphan = int(worker.stdout.readline())
        assert belongs_to(orphan, worker.pid)
        assert not belongs_to(os.getpid(), worker.pid)
        worker.stdin.close()


def test_a_worker_that_asks_before_the_agent_knows_it_waits(issuer: Issuer) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASKS, issuer.address, "rank", "[0]", "0"], stdout=subprocess.PIPE, text=True
    ) as worker:
        until(lambda: any(thread.name == "ttp-issue" for thread in threading.enumerate()), "its question")
        issuer.workers({0: worker.pid})
        assert worker.communicate()[0].strip() == "given"


def test_a_term_has_one_process_which_may_ask_again(issuer: Issuer) -> None:
    first = ask(issuer.address, Identity(JOB, Role.CONTROLLER, term=7))
    again = ask(issuer.address, Identity(JOB, Role.CONTROLLER, term=7))
    assert first.certificate != again.certificate
    assert (
        asked_by_another_process(issuer, Role.CONTROLLER, [], 7) == f"process {os.getpid()} is the controller of term 7"
    )
    assert asked_by_another_process(issuer, Role.CONTROLLER, [], 8) == "given"


@pytest.mark.parametrize("term", [0, 100, 2**62])
def test_a_term_of_another_attempt_is_refused(issuer: Issuer, term: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 99"):
        ask(issuer.address, Identity(JOB, Role.CONTROLLER, term=term))


def test_a_process_of_another_attempt_is_refused(issuer: Issuer) -> None:
    issuer.workers({0: os.getpid()})
    with pytest.raises(ValueError, match="expected the one that runs, 'job/0'"):
        ask(issuer.address, Identity("job/1", Role.RANK, (0,)))
    issuer.begin(Authority(make_secret(), "job/1"), range(100, 200))
    issuer.workers({0: os.getpid()})
    assert ask(issuer.address, Identity("job/1", Role.RANK, (0,))).certificate
    with pytest.raises(ValueError, match="expected the one that runs, 'job/1'"):
        ask(issuer.address, Identity(JOB, Role.CONTROLLER, term=7))


@pytest.mark.parametrize("role", [Role.AGENT, Role.KEEPER])
def test_no_process_is_given_an_agents_or_a_keepers_certificate(issuer: Issuer, role: Role) -> None:
    issuer.workers({0: os.getpid()})
    with pytest.raises(ValueError, match="which is not given at this socket"):
        ask(issuer.address, Identity(JOB, role, (0,)))


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"role": 1},
        {"role": "king", "job_id": JOB, "ranks": [], "term": 0},
        {"role": "rank", "job_id": JOB, "ranks": "0", "term": 0},
        [1],
    ],
)
def test_a_request_that_is_none_is_refused_and_the_next_is_answered(issuer: Issuer, request_: object) -> None:
    issuer.workers({0: os.getpid()})
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(socket_name(issuer.address))
        frames.send(channel, request_)  # type: ignore[arg-type]
        answer, _ = frames.receive(channel)
    assert set(answer) == {"error"}
    assert ask(issuer.address, Identity(JOB, Role.RANK, (0,))).certificate


def test_garbage_and_silence_do_not_keep_others_waiting(issuer: Issuer) -> None:
    issuer.workers({0: os.getpid()})
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as garbage:
        silent.connect(socket_name(issuer.address))
        garbage.connect(socket_name(issuer.address))
        garbage.sendall(os.urandom(4096))
        assert ask(issuer.address, Identity(JOB, Role.RANK, (0,))).certificate


AS_ANOTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
name = "\\0" + sys.argv[2][1:]
channel = socket.socket(socket.AF_UNIX)
if sys.argv[1] == "asks":
    channel.connect(name)
    print(channel.recv(1))
else:
    channel.bind(name)
    channel.listen()
    print("listening", flush=True)
    sys.stdin.read()
"""
another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@another_user
def test_another_user_gets_no_answer(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    issuer.workers({0: os.getpid()})
    command = [sys.executable, "-c", AS_ANOTHER_USER, "asks", issuer.address]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "b''\n"
    until(lambda: "of user 65534 asked for a certificate and was refused" in caplog.text, "the issuer's line")
    assert ask(issuer.address, Identity(JOB, Role.RANK, (0,))).certificate


@another_user
def test_another_user_that_has_taken_the_agents_name_is_not_believed() -> None:
    """It could when the agent has ended, and would give out an authority of its own."""
    name = f"@ttp-test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", AS_ANOTHER_USER, "listens", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as listener:
        assert listener.stdout is not None and listener.stdin is not None
        assert listener.stdout.readline() == "listening\n"
        with pytest.raises(ValueError, match="is of user 65534, expected an agent of user 0"):
            ask(name, Identity(JOB, Role.RANK, (0,)))
        listener.stdin.close()


def test_an_agent_that_is_killed_leaves_no_socket(tmp_path: Path) -> None:
    code = "from ttp.identity.issuer import Issuer; print(Issuer('host').address, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as agent:
        assert agent.stdout is not None
        address = agent.stdout.readline().strip()
        assert address in Path("/proc/net/unix").read_text()
        agent.kill()
    assert address not in Path("/proc/net/unix").read_text() and not list(tmp_path.iterdir())


def test_who_cannot_reach_the_agent_gets_an_error(issuer: Issuer) -> None:
    with pytest.raises(OSError):
        ask(issuer.address + "_other", Identity(JOB, Role.RANK, (0,)))


def test_a_new_attempt_knows_neither_the_last_ones_workers_nor_its_controllers(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttp.identity.issuer.WORKERS_S", 0.01)
    issuer.workers({0: os.getpid()})
    assert ask(issuer.address, Identity(JOB, Role.CONTROLLER, term=7)).certificate
    issuer.begin(Authority(make_secret(), JOB), range(1, 100))
    with pytest.raises(ValueError, match=r"expected one of this node's \[\]"):
        ask(issuer.address, Identity(JOB, Role.RANK, (0,)))
    assert asked_by_another_process(issuer, Role.CONTROLLER, [], 7) == "given"


def test_a_term_whose_process_has_ended_may_have_another_one(issuer: Issuer) -> None:
    assert asked_by_another_process(issuer, Role.CONTROLLER, [], 7) == "given"
    assert ask(issuer.address, Identity(JOB, Role.CONTROLLER, term=7)).certificate


def test_a_controllers_certificate_speaks_for_no_rank(issuer: Issuer) -> None:
    issuer.workers({0: os.getpid()})
    issued = ask(issuer.address, Identity(JOB, Role.CONTROLLER, (0,), term=7))
    assert certified(names_of(issued.certificate)) == Identity(JOB, Role.CONTROLLER, term=7, node="host")


def test_neither_descriptors_nor_silence_pile_up(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    issuer.workers({0: os.getpid()})
    before = len(os.listdir("/proc/self/fd"))
    request = {"role": "rank", "job_id": JOB, "ranks": [0], "term": 0}
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(socket_name(issuer.address))
        frames.send(channel, request, (0, 1, 2))
        assert "credentials" in frames.receive(channel)[0]
    monkeypatch.setattr("ttp.identity.issuer.REQUEST_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(socket_name(issuer.address))
        silent.settimeout(10.0)
        assert silent.recv(1) == b""  # it is not waited for
    for thread in threading.enumerate():
        if thread.name == "ttp-issue":
            thread.join(10.0)
    assert len(os.listdir("/proc/self/fd")) <= before  # what earlier tests have dropped may go meanwhile


def test_descriptors_that_are_used_up_do_not_end_it(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    issuer.workers({0: os.getpid()})
    real = issuer._listener
    failures = [OSError(24, "Too many open files"), OSError(24, "Too many open files")]

    class Scarce:
        def accept(self) -> object:
            if failures:
                raise failures.pop()
            return real.accept()

    monkeypatch.setattr(issuer, "_listener", Scarce())
    ask(issuer.address, Identity(JOB, Role.RANK, (0,)))  # taken by the call that waited before
    assert ask(issuer.address, Identity(JOB, Role.RANK, (0,))).certificate
    assert not failures
    monkeypatch.setattr(issuer, "_listener", real)


def test_who_asks_while_a_worker_is_being_started_waits_until_it_is_known(issuer: Issuer) -> None:
    """It may ask before the agent knows its number, and is not refused for the process whose place it takes."""
    with subprocess.Popen(["sleep", "60"]) as before:
        issuer.workers({2: before.pid})
        issuer.workers(None)
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(ask(issuer.address, Identity(JOB, Role.RANK, (2,)))))
        asking.start()
        until(lambda: any(thread.name == "ttp-issue" for thread in threading.enumerate()), "the request")
        issuer.workers({2: os.getpid()})
        asking.join(30.0)
        before.kill()
    assert len(answers) == 1
