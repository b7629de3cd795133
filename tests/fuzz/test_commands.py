"""Command lines of `ttp status`, `chaos`, `drain`, `doctor` and of `python -m ttp.goodput`: understood, or refused with 2 in one line."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.test_files import one_line
from tests.fuzz.test_settings import VALUES
from ttp.chaos import cli as chaos
from ttp.doctor import job_layout
from ttp.doctor import main as doctor
from ttp.errors import ConfigError
from ttp.goodput import main as goodput
from ttp.identity.secret import SecretSource
from ttp.launch import drain
from ttp.launch.rendezvous.multi_endpoint import parse_endpoints
from ttp.status import main as status
from ttp.status.find_job import find
from ttp.trainer.config.memory_size import memory_bytes

settings.load_profile("fuzz")

MORE = (*(value for value in VALUES if "\0" not in value), "GPT_TINY", "gpt_tiny", "120GB", "1e9GB", "0GB", "h:1", "h:0", "[::1]:7", "[::1", "hung=0.1", "hung=nan", "exited=1e9", "a.png", ".svg",
        "0/1", "1/1", "0/0", "2h", "30m", "0.0s", "9" * 12 + "d", "kill", "kill,stop", ",", "\u2028", "🙂", "[red]", "a,b,a", "h:1,h:1", "--", "-")  # fmt: skip


def words(rng: random.Random, options: Sequence[str], first: Sequence[str] = ()) -> list[str]:
    """Return a command line: options with values at random, some of which are missing."""
    found = list(first)
    for _ in range(rng.randrange(1, 5)):
        found += [rng.choice(options)] if options and rng.random() < 0.8 else []
        found += [rng.choice(MORE)] if rng.random() < 0.8 else []
    return found


def reads_status(argv: Sequence[str]) -> None:
    find(status.parse(argv).job)


def reads_drain(argv: Sequence[str]) -> None:
    asked = drain.parse(["node-b", *argv])
    parse_endpoints(asked.rdzv_endpoint)
    SecretSource(file=asked.secret_file).read()


def reads_doctor(argv: Sequence[str]) -> None:
    asked = doctor.parse(argv)
    doctor._not_checked(asked)
    if asked.state is not None:
        memory_bytes(asked.state, "--state")
    for address in asked.peer:
        doctor._place(address, "--peer")
    if asked.listen is not None:
        doctor._place(asked.listen, "--listen")
    if asked.config is not None:
        job_layout.read(asked.config, asked.overrides, asked.nproc_per_node, asked.nnodes)


def reads_soak(argv: Sequence[str]) -> None:
    chaos._soak(chaos.parser().parse_args(["run", "scenario.yaml", *chaos._split(argv)[0]]))


def reads_matrix(argv: Sequence[str]) -> None:
    chaos._plan(chaos.parser().parse_args(["matrix", *chaos._split(argv)[0]]), Path("output"), "matrix")


READ: dict[str, tuple[Callable[[Sequence[str]], None], Sequence[str]]] = {
    "status": (reads_status, ("--json", "--watch", "--login", "--ranks")),
    "drain": (reads_drain, ("--rdzv-endpoint", "--rdzv-id", "--secret-file", "--reason", "--wait", "--rdzv-endpoint=h:1", "--rdzv-id=j")),
    "doctor": (reads_doctor, ("--save-dirs", "--nproc-per-node", "--nnodes", "--nodes", "--config", "--state", "--device", "--peer", "--listen",
                              "--training_config.seed", "--config=gpt_tiny")),
    "chaos run": (reads_soak, ("--seed", "--baseline", "--duration", "--faults-per-hour", "--output", "--keep", "--duration=2h")),
    "chaos matrix": (reads_matrix, ("--repeat", "--per-job", "--shard", "--limit", "--minutes", "--kinds", "--seed", "--nodes", "--table")),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
@given(rng=st.randoms(use_true_random=True))
def test_a_command_line_is_understood_or_refused_in_one_line(name: str, rng: random.Random) -> None:
    """Up to what asks another process, or begins a run."""
    read, options = READ[name]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), empty_folder():
        try:
            read(words(rng, options))
        except SystemExit as end:
            assert end.code in (0, 2)
        except ConfigError as error:
            one_line(error)


@contextlib.contextmanager
def empty_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder, contextlib.chdir(folder):
        yield


RUN: dict[str, tuple[Callable[[Sequence[str]], int], Sequence[str], Sequence[str]]] = {
    "chaos check": (chaos.main, ("check",), ()),
    "chaos report": (chaos.main, ("report",), ("--output",)),
    "chaos run": (chaos.main, ("run", "missing.yaml"), ("--output", "--seed", "--baseline", "--duration", "--faults-per-hour", "--keep", "--")),
    "chaos matrix": (chaos.main, ("matrix", "--table"), ("--output", "--nodes", "--in-place", "--repeat", "--shard", "--kinds")),
    "goodput": (goodput.main, (), ("--ranks", "--like", "--job", "--fault", "--save-s", "--step-s", "--interval-s", "--slowdown", "--simulate",
                                   "--days", "--seed", "--plot", "--json")),
    "status": (status.main, (), ("--json", "--ranks", "--login")),
}  # fmt: skip
ADDRESSES = ("1:2", "2:1", "h:1", "[::1]:7")


@pytest.mark.parametrize("name", RUN)
@given(rng=st.randoms(use_true_random=True))
def test_a_command_does_it_or_is_refused_in_one_line(name: str, rng: random.Random) -> None:
    """What it prints goes into a file of UTF-8, as a shell's does."""
    main, first, options = RUN[name]
    argv = [each for each in words(rng, options, first) if each not in ADDRESSES]  # no other machine is asked
    written = io.BytesIO()
    out, error = (
        io.TextIOWrapper(written, "utf-8", errors, write_through=True) for errors in ("strict", "backslashreplace")
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(empty_folder())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(error))
        stack.enter_context(mock.patch.object(goodput, "MOST_FAULTS", 1.0))
        try:
            status = main(argv)
        except SystemExit as end:
            assert end.code in (0, 2), end.code
            return
        out.flush()
    assert status in (0, 2), status
    said = written.getvalue()
    assert said
    if status:
        assert said.count(b"\n") == 1, said[:2000]
        said.decode()
