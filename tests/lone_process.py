"""Training in the tests' own process, as the only rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from ttp.session import find_session


@pytest.fixture(autouse=True)
def ends_every_session() -> Iterator[None]:
    """No test leaves a session, its threads or its controller to the next. Holds where a conftest.py imports it."""
    yield
    end_session()


def end_session() -> None:
    session = find_session()
    if session is not None:
        session.close()


@contextlib.contextmanager
def lone_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train without processes around and without protection, and leave torch as it was."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TTP_FAULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ENABLE_TTP", "False")
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():  # a run that failed leaves its group
        torch.distributed.destroy_process_group()
    end_session()
