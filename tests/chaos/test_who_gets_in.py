"""Real jobs that others try to get into: nothing changes for them, no secret shows, and what was refused is logged."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.conftest import STEPS, RunJob, arguments
from tests.chaos.launching import Launch
from tests.ports import free_port
from ttp.controller.agent_link import request_shutdown, request_status
from ttp.errors import ControllerError
from ttp.identity import own
from ttp.identity.authority import Authority
from ttp.identity.own import ask
from ttp.identity.role import Identity, Role
from ttp.identity.secret import Secret, make_secret
from ttp.proto.address import split_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

WAITS = """
from ttp.runtime.rank_runtime import Protection
protect = Protection.__init__
def protect_and_wait(self, *given, **more):
    protect(self, *given, **more)
    note("identity", os.environ["TTP_IDENTITY"])
    note("protected", self.processor.controller)
    await_file(f"go-{start}")
Protection.__init__ = protect_and_wait
from ttp.trainer.__main__ import run_as_program
sys.argv = ["ttp.trainer", *sys.argv[2:]]
run_as_program()
"""
"""The bundled trainer; each rank notes how it is protected, and waits before its first step."""


@contextlib.contextmanager
def speaking_as(identity: Identity | None, authority: Authority | None) -> Iterator[None]:
    """Let this process have a certificate of this authority for a while."""
    issued = authority.issue(identity) if authority is not None and identity is not None else None
    own.use((lambda: issued) if issued is not None else None)
    try:
        yield
    finally:
        own.use(None)


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as `/proc/net/tcp` and `tcp6` write it."""


def listening_hosts(port: int) -> set[str]:
    """Return on which addresses a port listens, as the kernel writes them."""
    tables = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    places = [fields[1].partition(":") for fields in tables if fields[3] == "0A"]
    return {host for host, _, number in places if int(number, 16) == port}


def test_a_job_on_one_node_is_not_touched_by_who_has_no_certificate_of_it(tmp_path: Path, whole_job: RunJob) -> None:
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    with Launch(tmp_path, WAITS, "--nproc-per-node", "2", arguments=trainer) as job:
        job.await_notes("protected-0-0", "protected-1-0")
        address, issuer = job.read("protected-0-0"), job.read("identity-0-0")
        place, term = split_address(address)
        port = int(place.rpartition(":")[2])
        assert term == 1
        assert listening_hosts(port) and listening_hosts(port) <= LOOPBACK
        job_id = "none/0"  # it has a random name
        stranger = Authority(make_secret(), job_id)
        for attack in (
            speaking_as(None, None),
            speaking_as(Identity(job_id, Role.AGENT, (0, 1)), stranger),
            speaking_as(Identity(job_id, Role.CONTROLLER, term=9), stranger),
        ):
            with attack:
                for ask_for in (request_status, request_shutdown):
                    with pytest.raises(ControllerError, match="UNAVAILABLE"):
                        ask_for(address)
        for role, ranks in ((Role.RANK, (0,)), (Role.AGENT, (0, 1))):
            with pytest.raises(ValueError, match="expected"):
                ask(issuer, Identity(job_id, role, ranks))
        with socket.create_connection(("127.0.0.1", port)) as garbage:
            garbage.sendall(os.urandom(1 << 16))
        (tmp_path / "go-0").touch()
        assert job.wait() == 0, job.text
        assert "was refused" in job.text
        job.assert_nothing_left()
        assert issuer not in Path("/proc/net/unix").read_text()
    final, baseline = (json.loads((folder / "final.json").read_text()) for folder in (output, whole_job(2).output_dir))
    assert final == baseline


def shown_of(launches: list[Launch]) -> bytes:
    """Return all that the processes of these launches show: command lines and environments."""
    found = b""
    for job in launches:
        for pid in job.marked():
            with contextlib.suppress(OSError):
                found += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    return found


@pytest.mark.long
def test_two_nodes_with_a_secret_file_survive_a_kill_and_show_the_secret_nowhere(tmp_path: Path) -> None:
    text = secrets.token_hex(32)
    secret = tmp_path / "job.secret"
    secret.write_text(f"{text}\n")
    secret.chmod(0o600)
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job7"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    environ = {"TTP_FAULTS": "kill:rank=1,step=5,point=backward,round=0", "TTP_HOST": "127.0.0.1"}
    ways: tuple[tuple[list[str], dict[str, str]], ...] = (
        (["--secret-file", str(secret)], {}),
        ([], {"TTP_SECRET": text}),
    )  # both name one secret
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                Launch(
                    tmp_path,
                    WAITS,
                    *options,
                    *given,
                    environ={**environ, **variables},
                    arguments=trainer,
                    name=f"node{node}",
                )
            )
            for node, (given, variables) in enumerate(ways)
        ]
        both[0].await_notes("protected-0-0", "protected-1-0")
        assert text.encode() not in shown_of(both), "a process of the job shows the secret"
        address = both[0].read("protected-0-0")
        job_id = "job7/0"
        with speaking_as(Identity(job_id, Role.OPERATOR), Authority(Secret(text.encode()), job_id)):
            assert request_status(address, job_id=job_id).world_size == 2
        stranger = Authority(make_secret(), job_id)
        with (
            speaking_as(Identity(job_id, Role.AGENT, (0, 1)), stranger),
            pytest.raises(ControllerError, match="UNAVAILABLE"),
        ):
            request_shutdown(address)
        (tmp_path / "go-0").touch()
        (tmp_path / "go-1").touch()
        assert [job.wait() for job in both] == [0, 0], "".join(job.text for job in both)
        for job in both:
            job.assert_nothing_left()
    assert json.loads((output / "final.json").read_text())["step"] == STEPS
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret]
    assert len(written) > 10
    for path in written:
        content = path.read_bytes()
        assert text.encode() not in content and b"PRIVATE KEY" not in content, path
