"""A server for the tests of a folder, and small mirrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.s3 import BUCKET, S3, serving
from tests.unit.checkpoint.conftest import Job, make_job
from ttp.mirror import remote
from ttp.mirror.remote import Remote


@pytest.fixture(scope="session")
def server() -> Iterator[S3]:
    with serving() as found:
        yield found


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, whose proxy does nothing of itself, and this process's way to it."""
    server.proxy.cut_after, server.proxy.refusals, server.proxy.down = [], 0, False
    server.proxy.cuts = server.proxy.refused = server.proxy.answer_cuts = 0
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.01)
    return server


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A mirror of each kind, empty."""
    if request.param == "file":
        return f"file://{tmp_path}/mirror"
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def s3_url(s3: S3, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def job() -> Job:
    return make_job()


Open = Callable[[str], Remote]
