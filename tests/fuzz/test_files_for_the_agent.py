"""Files that ranks leave for their agent: read, or taken for none, and whatever is read makes a report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.test_files import changed, one_line
from ttp.exchange import controller_file, last_step, saved_alone
from ttp.exchange.controller_file import Controllers
from ttp.exchange.last_step import LastStep
from ttp.exchange.saved_alone import SavedAlone
from ttp.launch.report.render import fault_lines
from ttp.launch.report.saved_alone_report import report_of_save
from ttp.launch.report.summary import Summary, lost_text

ACCOUNT = dataclasses.asdict(SavedAlone(10.0, 11.0, 7, "/a/iter_0000007", "", (1,), 3, "/a/iter_0000005"))
LAST: dict[str, Any] = {"unix_s": 11.0, "step": 7, "saved_step": 7}
KNOWN = dataclasses.asdict(Controllers(("a:8000", "b:8001"), 12, "/logs"))


def report_account(folder: Path) -> None:
    account = saved_alone.read(folder, 0, 9.0)
    if account is not None and account.world_size < 10_000:
        assert fault_lines(report_of_save(0, account))


def report_last_step(folder: Path) -> None:
    last = last_step.read(folder, 0, 9.0)
    assert last is None or isinstance(last, LastStep)
    counts = ("starts", "faults", "notices", "false_alarms", "steps_lost", "unknown_losses", "lost_s", "lasted_s")
    known: dict[str, Any] = dict.fromkeys(counts, 0)
    assert lost_text(Summary(**known, result="succeeded", saved_steps=(), ended_in_fault=False, last=last))


def read_controllers(folder: Path) -> None:
    try:
        known = controller_file.read(folder)
    except (OSError, ValueError) as error:
        one_line(error)
    else:
        assert known is not None and all(":" in address for address in known.addresses)


@pytest.mark.parametrize(
    ("name", "base", "use"),
    [
        (saved_alone.path_of(Path(), 0).name, ACCOUNT, report_account),
        (last_step.path_of(Path(), 0).name, LAST, report_last_step),
        (controller_file.NAME, KNOWN, read_controllers),
    ],
    ids=["account", "last step", "controllers"],
)
@given(rng=st.randoms(use_true_random=True))
def test_whatever_a_file_for_the_agent_holds_the_agent_goes_on(
    name: str, base: dict[str, Any], use: Callable[[Path], None], rng: random.Random
) -> None:
    content = json.dumps(changed(base, rng)).encode()
    if rng.random() < 0.2:
        cut_off = content[: rng.randrange(len(content) + 1)]
        content = rng.choice((rng.randbytes(50), b"[" * 100_000, b"1" * 5000, b"\xff\xfe", cut_off))
    with tempfile.TemporaryDirectory(prefix="ttp_fuzz_") as folder:
        (Path(folder) / name).write_bytes(content)
        with contextlib.chdir(folder):
            use(Path(folder))
