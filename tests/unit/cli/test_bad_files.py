"""JSON and journals that came from elsewhere: a pipe is not waited for, and no content ends in a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.runtime.test_replay import EVENTS, record
from ttp.chaos.cli import main as chaos_main
from ttp.chaos.run.campaign import read_baseline
from ttp.controller.replay import main as replay_main
from ttp.errors import ConfigError
from ttp.exchange import last_step, saved_alone
from ttp.inputs.input_file import read_json
from ttp.trainer.convert import main as convert_main
from ttp.trainer.data.tokenizer import _named_end


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def holding(content: str) -> Callable[[Path], None]:
    return lambda path: _write(path, content.encode())


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


CONTENTS: dict[str, Callable[[Path], None]] = {
    "a pipe": a_pipe,
    "a folder": Path.mkdir,
    "no UTF-8": lambda path: _write(path, b"\xff\xfe"),
    "empty": holding(""),
    "nested": holding("[" * 100_000),
    "nested objects": holding('{"a":' * 100_000),
    "digits": holding("1" * 5000),
    "a list": holding("[1, 2]"),
    "null": holding("null"),
    "a string": holding('"x"'),
    "an empty object": holding("{}"),
    "odd objects": holding(
        json.dumps(
            {
                "incidents": 5, "verdicts": [None], "curves": {"a": 1}, "name": [], "steps": {"x": 1}, "final": 7, "world_size": "²", "model_type": "gpt2",
                "n_layer": "12", "step": {}, "saved_step": [], "unix_s": "x", "eos_token": [1], "noticed": 3,
            }
        )
    ),
}  # fmt: skip


@pytest.fixture(params=CONTENTS)
def content(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return CONTENTS[request.param]


@pytest.mark.timeout(60)
def test_a_result_that_is_none_is_refused(
    content: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ttp chaos report`, and `--baseline`."""
    path = tmp_path / "result.json"
    content(path)
    assert chaos_main(["report", str(path)]) == 2
    assert "ttp chaos: " in capsys.readouterr().out and not (tmp_path / "report.html").exists()
    with pytest.raises(ConfigError) as caught:
        read_baseline(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.timeout(60)
def test_a_model_of_another_library_that_is_none_is_refused(
    content: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content(tmp_path / "config.json")
    assert convert_main(["from-hf", str(tmp_path), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "config.json" in err and len(err) < 1000 and not (tmp_path / "out").exists()
    content(tmp_path / "tokenizer_config.json")
    end = _named_end(tmp_path)
    assert end is None or isinstance(end, str)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": "12"}, "n_layer: got '12', expected an integer from 1 to"),
        ({"n_layer": None}, "n_layer: got None, expected an integer"),
        ({"n_embd": 2.5}, "n_embd: got 2.5, expected an integer"),
        ({"n_embd": 10**30}, "n_embd: got 1000000000"),
        ({"n_head": 0}, "n_head: got 0"),
        ({"resid_pdrop": [0.1]}, "resid_pdrop: got [0.1], expected a finite number"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon: got '1e-5'"),
        ({"model_type": ["gpt2"]}, "model_type: got ['gpt2'], expected one of"),
        ({"model_type": "llama", "rope_parameters": [1]}, "rope_parameters: got [1], expected a mapping"),
        ({"model_type": "llama", "rope_scaling": {"rope_theta": "x"}}, "rope_scaling.rope_theta: got 'x'"),
        ({"model_type": "llama", "sliding_window": "x"}, "sliding_window: got 'x'"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name(
    change: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **change}))
    assert convert_main(["from-hf", str(tmp_path), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err


@pytest.mark.timeout(60)
def test_notes_of_an_attempt_that_are_none_count_as_absent(content: Callable[[Path], None], tmp_path: Path) -> None:
    """An agent reads them at an attempt's end: it waits for no pipe."""
    for module in (last_step, saved_alone):
        content(module.path_of(tmp_path, 0))
        assert module.read(tmp_path, 0, 0.0) is None


@pytest.mark.timeout(60)
def test_a_journal_that_is_none_is_refused(
    content: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its two files; the event log may be empty, and differs then."""
    for number, name in enumerate(("journal_0.jsonl", "journal_0.jsonl.inputs")):
        path = tmp_path / str(number) / "journal_0.jsonl"
        path.parent.mkdir()
        record(path, EVENTS)
        broken = path.with_name(name)
        broken.unlink()
        content(broken)
        if broken.is_file():
            with broken.open("a") as file:
                file.write("\n")
        assert replay_main([str(path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and len(err) < 1000, err


def test_a_journal_without_recorded_inputs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to replay, and nothing was compared."""
    path = tmp_path / "journal_0.jsonl"
    path.write_text("")
    assert replay_main([str(path)]) == 2
    assert "there are no recorded inputs" in capsys.readouterr().err


def test_a_value_within_a_journal_that_is_of_another_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal_0.jsonl"
    record(path, EVENTS)
    inputs = path.with_name("journal_0.jsonl.inputs")
    first, *rest = inputs.read_text().splitlines()
    for change in ({"state": 5}, {"state": {"$": "os:system"}}, {"state": None}, {"state": {"$": "ttp.x:Y"}}):
        inputs.write_text("\n".join([json.dumps({**json.loads(first), **change}), *rest, ""]))
        assert replay_main([str(path)]) == 2, change


def test_json_is_read_from_a_regular_file_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"x": [1, 2.5, null]}')
    assert read_json(tmp_path / "a") == {"x": [1, 2.5, None]}
    (tmp_path / "b").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(tmp_path / "b")
    with pytest.raises(OSError, match="expected at most 3 bytes"):
        read_json(tmp_path / "a", 3)
