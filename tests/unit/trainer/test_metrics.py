"""metrics.jsonl keeps the exact bits, survives kills at any byte, and distinguishes restarts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.errors import ConfigError
from ttp.trainer.metrics import MetricsFile, StepMetrics, account, lacks_only, read_lines


def metrics(step: int = 5, loss: float = 10.341485, **changes: object) -> StepMetrics:
    values: dict[str, object] = {
        "step": step,
        "epoch": 0,
        "loss": loss,
        "grad_norm": 1.5,
        "learning_rates": (1.25e-6, 1.25e-6),
        "loss_scale": 4096.0,
        "skipped": False,
        "tokens": 4096,
        "time_s": 1.40324,
        "consumed_samples": 40,
    }
    return StepMetrics(**{**values, **changes})  # type: ignore[arg-type]


def test_step_line_has_the_exact_form() -> None:
    """The form that people's tools parse, frozen."""
    assert metrics().text() == (
        "train: Epoch:0, Step:5, Loss: 10.341485, Finite_grads: True, Loss_scale: 4096.0,"
        " Learning_rate: (1.250000e-06,1.250000e-06,), Time: 1403.24 ms"
    )
    assert "Loss: 10.38118, Finite_grads: False," in metrics(loss=10.38118, skipped=True).text()


@pytest.mark.parametrize("value", [0.1 + 0.2, 5e-324, math.inf, math.nan, 0.0])
def test_bits_survive_the_file(tmp_path: Path, value: float) -> None:
    """float.hex for machines; what JSON lacks reads as null beside it; every line is strict JSON."""
    file = MetricsFile(tmp_path / "m")
    file.append(metrics(loss=value, grad_norm=value).line(unix_s=1.0))

    def no_constants(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    line = json.loads((tmp_path / "m").read_text(), parse_constant=no_constants)
    for key in ("loss", "grad_norm"):
        assert float.fromhex(line[key]).hex() == value.hex()
        assert line[f"{key}_value"] == (value if math.isfinite(value) else None)
    assert line["tokens_per_s"] == pytest.approx(4096 / 1.40324, abs=0.1)
    assert line["time_ms"] == 1403.24
    assert line["lr"] == [1.25e-6, 1.25e-6]


def test_line_is_in_the_kernel_when_append_returns(tmp_path: Path) -> None:
    """No buffer that a SIGKILL would take along."""
    file = MetricsFile(tmp_path / "m")
    file.append({"step": 1})
    assert (tmp_path / "m").read_bytes() == b'{"step": 1}\n'


def test_torn_last_line_is_cut_in_the_next_attempt(tmp_path: Path) -> None:
    """At every byte where the writer could have died."""
    whole = b'{"step": 1}\n{"step": 2}\n'
    for size in range(len(whole) + 1):
        (tmp_path / "m").write_bytes(whole[:size])
        file = MetricsFile(tmp_path / "m")
        file.append({"step": 9})
        kept = [line["step"] for line in read_lines(tmp_path / "m")]
        assert kept == ([1, 2, 9] if size == len(whole) else [1, 9] if size >= 12 else [9])
        file.close()


def test_account_drops_what_a_resume_did_not_keep() -> None:
    """A step trained again counts once, by its later line."""
    lines = [
        {"event": "start", "from_step": 0},
        {"step": 1, "loss": "a"},
        {"step": 2, "loss": "b"},
        {"step": 3, "loss": "c"},
        {"event": "resume", "from_step": 1},
        {"step": 2, "loss": "d"},
    ]
    assert {step: line["loss"] for step, line in account(lines).items()} == {1: "a", 2: "d"}
    assert account([*lines, {"event": "start", "from_step": 0}]) == {}


def recovered_line(step: int) -> dict[str, object]:
    return metrics(step=step, tokens=None, time_s=None).line(unix_s=2.0)


@pytest.mark.parametrize(
    ("before", "resumed_at", "fills"),
    [
        ([1, 2], 3, True),  # step 3 was committed, its line never written
        ([], 1, True),  # the very first step
        ([1, 2, 3], 3, False),  # the line is there
        ([1, 2, 3, 4], 3, False),  # an older checkpoint: the line is there
        ([1], 3, False),  # more is missing than one line: not ours to invent
    ],
)
def test_line_that_died_with_rank_0_is_recovered(
    tmp_path: Path, before: list[int], resumed_at: int, fills: bool
) -> None:
    """From the commit record in the checkpoint, marked as such."""
    file = MetricsFile(tmp_path / "m")
    file.append({"event": "start", "from_step": 0})
    for step in before:
        file.append(metrics(step=step).line(unix_s=1.0))
    assert file.resumed(resumed_at, {"path": "p"}, recovered_line(resumed_at)) == fills
    lines = read_lines(tmp_path / "m")
    assert [line["from_step"] for line in lines if line.get("event") == "resume"] == [resumed_at]
    assert [line["step"] for line in lines if line.get("recovered")] == ([resumed_at] if fills else [])
    assert all(line["time_ms"] is None for line in lines if line.get("recovered"))
    assert resumed_at in account(lines) or before == [1]


def test_resume_in_an_empty_folder_invents_no_line(tmp_path: Path) -> None:
    """The checkpoint was brought from elsewhere: its steps' lines are there."""
    file = MetricsFile(tmp_path / "m")
    assert not file.resumed(8, {}, recovered_line(8))
    assert account(read_lines(tmp_path / "m")) == {}


HISTORIES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.frozensets(st.integers(1, 12))), max_size=5)
"""Attempts: from which step each resumes, how many it makes, and which lines are missing."""


@pytest.mark.parametrize("block", [1, 16, 1 << 16])
@given(attempts=HISTORIES, step=st.integers(1, 12))
def test_what_the_account_lacks_is_found_from_the_end(
    tmp_path_factory: pytest.TempPathFactory, block: int, attempts: list[tuple[int, int, frozenset[int]]], step: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "history"
    lines: list[dict[str, object]] = []
    for from_step, count, missing in attempts:
        lines.append({"event": "resume", "from_step": from_step})
        lines += [{"step": made} for made in range(from_step + 1, from_step + count + 1) if made not in missing]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = account(lines)
    expected = bool(lines) and step not in kept and (step == 1 or step - 1 in kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ttp.trainer.metrics.BLOCK", block)
        assert lacks_only(path, step) == expected


DAMAGED = [
    b"\0" * 300 + b'{"step": 3}',
    b"\0\0\0",
    b"\xff\xfe{",
    b'{"step": 3',
    b"[3]",
    b"3",
    b"null",
    b'{"loss": "0x1p+0"}',
    b'{"step": "3"}',
    b'{"step": null}',
    b'{"step": true}',
    b'{"step": 3.0}',
    b'{"step": -3}',
    b'{"event": "resume"}',
    b'{"event": "resume", "from_step": "1"}',
    b'{"event": "resume", "from_step": [1]}',
    b"[" * 100_000,
    b'{"step": ' + b"1" * 5000 + b"}",
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_lines_are_passed_over_with_one_warning(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever they are: the account is what the other lines say, a resume goes on, and a lost line is recovered in their place."""
    path = tmp_path / "m"
    good = [b'{"event": "start", "from_step": 0}', b'{"step": 1}', b'{"step": 2}']
    path.write_bytes(b"\n".join([damaged, damaged, good[0], damaged, *good[1:], damaged, b""]))
    assert read_lines(path) == [json.loads(line) for line in good]
    assert len(caplog.records) == 1
    (message,) = caplog.messages
    assert message.startswith(f"{path}: passed over damaged lines; the first") and len(message) < 700
    assert "\n" not in message
    caplog.clear()
    file = MetricsFile(path)
    assert file.resumed(3, {}, {"step": 3})
    assert sorted(account(read_lines(path))) == [1, 2, 3]
    assert len(caplog.records) == 2  # the resume's, and that of read_lines


@pytest.mark.parametrize("damaged", DAMAGED)
def test_account_of_nothing_but_damaged_lines_lacks_no_line(tmp_path: Path, damaged: bytes) -> None:
    """It is as good as empty: nothing is invented."""
    (tmp_path / "m").write_bytes((damaged + b"\n") * 3)
    assert not lacks_only(tmp_path / "m", 1)
    assert read_lines(tmp_path / "m") == []


@pytest.mark.parametrize("block", [1, 16, 1 << 16])
@pytest.mark.parametrize("before", [b"", b'{"step": 1}\n'])
@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 2}'])
def test_line_that_is_still_being_written_is_neither_read_nor_damaged(
    tmp_path: Path,
    block: int,
    before: bytes,
    torn: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its newline is what makes it whole; and a good file causes no warning."""
    monkeypatch.setattr("ttp.trainer.metrics.BLOCK", block)
    (tmp_path / "m").write_bytes(before + torn)
    assert read_lines(tmp_path / "m") == ([{"step": 1}] if before else [])
    assert lacks_only(tmp_path / "m", 2) == bool(before) and not lacks_only(tmp_path / "m", 3)
    assert not caplog.records


@pytest.mark.parametrize("torn", [b"", b'{"step": 1'])
def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, torn: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning is not even JSON: a new process of rank 0 would else wait for the account of a million steps."""
    monkeypatch.setattr("ttp.trainer.metrics.BLOCK", 100)
    path = tmp_path / "m"
    path.write_bytes(b"?" * 5000 + b"\n" + b"".join(b'{"step": %d}\n' % step for step in range(90, 100)) + torn)
    file = MetricsFile(path)
    assert file.resumed(100, {}, {"step": 100})
    assert [json.loads(line) for line in path.read_bytes().splitlines()[-2:]] == [
        {"event": "resume", "from_step": 100},
        {"step": 100},
    ]


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """At the start, not at the first step."""
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=r"training_config.output_dir: .* cannot be written"):
        MetricsFile(tmp_path / "m")
