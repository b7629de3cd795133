"""Input that used to end in a traceback, or never: refused with one line and exit status 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ttp.chaos.faults.scenario import load_scenario, parse_scenario
from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.inputs.strict_yaml import load_yaml
from ttp.launch.checks import check_workers
from ttp.trainer.__main__ import main as trainer_main
from ttp.trainer.config.loader import load_config

YAML = [
    ("a: !!timestamp x", "line 1: got a value of type 'tag:yaml.org,2002:timestamp', expected a plain one"),
    ("a: !!int x", "line 1: got 'x', expected an integer of 64 bits"),
    ("a: !!float x", "line 1: got 'x', expected a number"),
    ("a: !!bool x", "line 1: got 'x', expected true or false"),
    ("a: 99999999999999999999", "expected an integer of 64 bits"),
    ("a: " + "1" * 5000, "expected an integer of 64 bits"),
    ("a: 0x" + "f" * 5000, "expected an integer of 64 bits"),
    ("[" * 3000, "invalid YAML: "),
    ("[" * 100 + "]" * 100, "nested deeper than 64 levels"),
    ("&a [*a]", "nested deeper than 64 levels"),
    ("a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)), "got more than 20000 values"),
    ('a: "\\0"', "expected a string without NUL"),
    ('a: "\\ud800"', "lone surrogates"),
    ("a: 1\na: 2", "line 2: key 'a' is given twice"),
    ("1: 2", "line 1: key: got 1, expected a string"),
    ("a: [", "line 1: expected the node content"),
    ("a: !!python/object:os.system x", "expected a plain one"),
    ("\x00", "special characters are not allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), YAML, ids=[f"{n}" for n in range(len(YAML))])
@pytest.mark.timeout(60)
def test_yaml_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    """By both of its readers."""
    with pytest.raises(ConfigError) as caught:
        load_yaml(text, "here")
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).startswith("here: ")
    path = tmp_path / "a.yaml"
    path.write_text(text)
    for read in (load_scenario, lambda path: load_config(str(path))):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert "\n" not in str(caught.value) and "a.yaml" in str(caught.value)


def test_a_date_is_a_string_and_an_exponent_a_number() -> None:
    """As YAML 1.2 has both; an impossible date is one too."""
    assert load_yaml("{a: 2020-99-99, b: 1e-4, c: 0x10, d: yes, e: null, f: [.inf, 1.5], g: '1'}", "here") == {
        "a": "2020-99-99", "b": 1e-4, "c": 16, "d": True, "e": None, "f": [float("inf"), 1.5], "g": "1"
    }  # fmt: skip
    assert load_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}", "here") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}
    assert load_yaml("", "here") is None


def a_pipe(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


def a_folder(path: Path) -> str:
    path.mkdir()
    return str(path)


def not_text(path: Path) -> str:
    path.write_bytes(b"\xff\xfe\xfd")
    return str(path)


def too_large(path: Path) -> str:
    path.write_bytes(b"#" * (2 << 20))
    return str(path)


@pytest.mark.parametrize("make", [a_pipe, a_folder, not_text, too_large, lambda path: "a\0b", lambda path: "\udcff"])
@pytest.mark.timeout(60)
def test_a_configuration_that_is_not_a_file_is_refused(
    make: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe is not waited for."""
    name = make(tmp_path / "config")
    assert trainer_main(["--config", name]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("ttp.trainer: --config ")
    with pytest.raises(ConfigError):
        load_scenario(Path(name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"faults": [{"fault": []}]}, r"fault: got \[\], expected one of"),
        ({"faults": [{"fault": "kill"}], "repeat": 10**30}, "repeat: got 1000000000.*, expected an integer from 1"),
        (
            {"faults": [{"fault": "kill"}], "repeat": 10**9},
            "repeat: got 1000000000 faults in all, expected at most 10000",
        ),
        (
            {"faults": [{"fault": "kill", "repeat": 10**9}]},
            "repeat: got 1000000000, expected an integer from 1 to 10000",
        ),
        ({"faults": [{"fault": "kill", "then": [{"fault": "kill", "repeat": 10**4}] * 2}]}, "faults in all"),
        ({"faults": [{"fault": "kill", "after_s": 10**400}]}, "after_s: got 1000"),
        ({"faults": [{"fault": "kill", "step": "²"}]}, "step: got"),
        ({"faults": [{"fault": "kill", "step": "1" * 5000}]}, "step: got"),
        ({"faults": [{"fault": "kill", "rank": 10**11}]}, "rank: got 100000000000, expected a rank from 0"),
        ({"faults": [{"fault": "kill", "rank": [-1] * 10_000}]}, "expected a rank from 0"),
        ({"faults": [{"fault": "kill"}], "name": ["x"]}, r"name: got \['x'\], expected a string"),
        ({"faults": [{"fault": "kill"}], "nodes": 10**6}, "nodes: got 1000000, expected an integer from 0 to 256"),
        ({"faults": [{"fault": "kill"}], "environ": {"": "x"}}, "environ: got the name '', expected one of a variable"),
        ({"faults": [{"fault": "kill"}], "environ": {"A=B": "x"}}, "got the name 'A=B'"),
    ],
)
@pytest.mark.timeout(60)
def test_a_scenario_is_bounded(content: object, message: str) -> None:
    """Before anything of that size is made."""
    with pytest.raises(ConfigError, match=message) as caught:
        parse_scenario(content, "here")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "argv",
    [
        ["--world-size", str(10**20)],
        ["--world-size", str(10**9 - 1)],
        ["--world-size", "1" * 5000],
        ["--world-size", "8", "--devices-per-node", str(10**20)],
        ["--world-size", "8", "--disk-gb-per-s", "1e-320"],
        ["--world-size", "8", "--disk-gb-per-s", "nan"],
        ["--world-size", "8", "--model_config.num_layers", str(10**12)],
        ["--world-size", "8", "--model_config.num_experts", str(10**12)],
        ["--world-size", "8", "--model_config.hidden_size", str(10**18)],
    ],
)
@pytest.mark.timeout(60)
def test_a_plan_is_bounded(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a world, or of a model, that no machine has room for."""
    assert trainer_main(["--plan", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 1000


@pytest.mark.parametrize("name", ["TTP_OT", "TTP_HEARTBEAT_S", "TTP_LEASE_S", "TTP_HANG_FLOOR_S", "TTP_HANG_START_S"])
def test_no_time_is_shorter_than_a_millisecond(name: str) -> None:
    """Nor not a number, nor longer than thirty years."""
    for value in ("1e-320", "0", "-1", "nan", "inf", "1e10"):
        with pytest.raises(ConfigError, match=name):
            Settings.from_env({name: value})


@pytest.mark.parametrize("name", ["TTP_HOST", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "TTP_MINDIO_DIR", "TTP_FAULTS"])
def test_a_name_that_no_message_can_carry_is_refused(name: str) -> None:
    """Bytes of the environment that are not UTF-8 come as lone surrogates."""
    with pytest.raises(ConfigError, match=f"{name}: got .*, expected a string without NUL and lone surrogates"):
        Settings.from_env({name: "\udcff"})


def test_an_integer_of_the_environment_is_bounded() -> None:
    """Also one of more digits than Python reads."""
    for value in (str(10**20), "1" * 5000, "x"):
        with pytest.raises(ConfigError, match="TTP_ATTEMPT='"):
            Settings.from_env({"TTP_ATTEMPT": value})


def test_workers_of_a_node_are_bounded() -> None:
    """torch would begin to make a list of them."""
    with pytest.raises(ConfigError, match=r"--nproc-per-node.*'1000000.*an integer from 1 to 100000"):
        check_workers(10**20, str(10**20))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENABLE_TTP", "maybe"),
        ("MASTER_PORT", "x"),
        ("MASTER_PORT", "70000"),
        ("MASTER_ADDR", "\udcff"),
        ("TTP_OT", "1e-320"),
    ],
)
def test_the_trainer_refuses_a_variable_before_it_takes_a_port(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As a rank that something else than ttprun has started: torch would end in a traceback, or wait."""
    for variable, given in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        name: value,
    }.items():
        monkeypatch.setenv(variable, given)
    assert trainer_main(["--config", "gpt_tiny", "--training_config.output_dir", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and name in err and not (tmp_path / "out").exists()
