"""What the variables of the environment may say: bad values are refused by name, nothing counts as not set."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch

from ttp import config
from ttp.config import VARIABLES, Settings, unknown_variables
from ttp.errors import ConfigError
from ttp.heartbeats import heartbeat_warning
from ttp.runtime.rank_runtime import _warnings

TIMES = (
    "TTP_OT", "TTP_HEARTBEAT_S", "TTP_LEASE_S", "TTP_VOUCHED_LEASE_S", "TTP_HANG_FLOOR_S", "TTP_HANG_FACTOR", "TTP_HANG_START_S", "TTP_BOUNDARY_S", "TTP_IN_PLACE_S",
)  # fmt: skip
SETTINGS = Path(__file__).resolve().parents[3] / "docs" / "settings.md"


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e309", "-1", "soon"])
def test_a_time_that_is_none_is_refused(name: str, value: str) -> None:
    """With a deadline of nan every survivor was ended at once; the variable is named."""
    with pytest.raises(ConfigError, match=name):
        Settings.from_env({name: value})


@pytest.mark.parametrize("name", [name for name in TIMES if name != "TTP_HANG_FACTOR"])
def test_a_time_that_no_timer_takes_is_refused(name: str) -> None:
    """The first wait would fail in the middle of a fault."""
    with pytest.raises(ConfigError, match=name):
        Settings.from_env({name: "1e10", "TTP_LEASE_S": "1e11"} if name == "TTP_HEARTBEAT_S" else {name: "1e10"})


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", "many", "9999999999"])
def test_a_count_that_is_none_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^invalid TTP_MAX_IN_PLACE=.*expected an integer[^\n]*$") as refused:
        Settings.from_env({"TTP_MAX_IN_PLACE": value})
    assert value in str(refused.value)


def test_a_floor_that_is_set_holds_before_fifty_steps_too() -> None:
    by_default, chosen = Settings.from_env({}), Settings.from_env({"TTP_HANG_FLOOR_S": "7"})
    assert (by_default.hang.floor_s, by_default.hang.early_floor_s) == (10.0, 60.0)
    assert (chosen.hang.floor_s, chosen.hang.early_floor_s) == (7.0, 7.0)


@pytest.mark.parametrize(
    ("ranks", "given", "times"),
    [
        ("8", {}, (1.0, 3.0)),
        ("2000", {}, (1.0, 3.0)),
        ("5000", {}, (2.5, 7.5)),
        ("10000", {}, (5.0, 15.0)),
        ("100000", {}, (5.0, 15.0)),
        ("10000", {"TTP_LEASE_S": "6"}, (2.0, 6.0)),
        ("10000", {"TTP_LEASE_S": "60"}, (5.0, 60.0)),
        ("10000", {"TTP_HEARTBEAT_S": "1"}, (1.0, 15.0)),
        ("10000", {"TTP_HEARTBEAT_S": "1", "TTP_LEASE_S": "3"}, (1.0, 3.0)),
        ("8", {"TTP_LEASE_S": "6"}, (1.0, 6.0)),
    ],
)
def test_heartbeats_of_a_large_job_are_rarer_where_nothing_else_is_set(
    ranks: str, given: dict[str, str], times: tuple[float, float]
) -> None:
    """Each rank has a stream of its own, and one controller takes 2,000 heartbeats a second with less than half of a core."""
    settings = Settings.from_env({"WORLD_SIZE": ranks, **given})
    assert (settings.heartbeat_s, settings.lease_s) == times


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_program_that_makes_the_settings_itself_is_refused_too(value: float) -> None:
    with pytest.raises(ConfigError, match="TTP_OT"):
        Settings(total_timeout_s=value)


@pytest.mark.parametrize("nothing", ["", " "])
def test_a_variable_that_is_set_to_nothing_is_not_set(nothing: str) -> None:
    """As a job script does whose own variable has no value: all alike."""
    assert Settings.from_env(dict.fromkeys(VARIABLES, nothing)) == Settings.from_env({})
    assert config.host_name({"TTP_HOST": nothing}) == socket.gethostname()


def test_the_tables_have_every_variable_and_no_other() -> None:
    """That of the module all of them, in order; docs/settings.md those that a user sets."""
    rows = re.findall(r"^\| ([A-Z_, ]+) \|", config.__doc__ or "", re.M)
    assert [name for row in rows for name in row.split(", ")] == list(VARIABLES)
    shown = SETTINGS.read_text()
    users = re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", shown, re.M)))
    by_programs = {
        "TTP_ATTEMPT",
        "TTP_ROUND_ID",
        "TTP_LAUNCHED",
        "TTP_FAULTS",
        "TTP_START_ID",
        "TTP_ATTEMPT_DIR",
        "TTP_CHAOS",
        "TTP_FORK_SERVER",
        "TTP_IDENTITY",
        "TTP_COPIES",
        "TTP_RELAY_SOCKET",
        "TTP_VACANT",
    }
    assert set(users) == set(VARIABLES) - by_programs


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, 1),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "TTP_ROUND_ID": "2"}, 2),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "TTP_ROUND_ID": "2", "TTP_ATTEMPT": "3"}, 3),
    ],
)
def test_an_attempts_number_is_read_by_its_new_name_first(environ: dict[str, str], number: int) -> None:
    """Then by the one before; without ttprun it is torchrun's count of restarts."""
    assert Settings.from_env(environ).round_number == number


def test_only_what_nothing_reads_is_unknown() -> None:
    """Names of other programs are none of TTP's."""
    environ = {**dict.fromkeys(VARIABLES, "1"), "TTP_TEST_MARK": "x", "TTPX": "1", "MY_TTP_OT": "1"}
    assert unknown_variables(environ) == {}
    assert unknown_variables({"TTP_HOSTS": "a"}) == {"TTP_HOSTS": "TTP_HOST"}


def test_a_heartbeat_alone_brings_its_lease() -> None:
    """Whatever knows how many ranks there are: a launcher does not."""
    for environ in ({}, {"WORLD_SIZE": "10000"}):
        found = Settings.from_env({**environ, "TTP_HEARTBEAT_S": "5"})
        assert (found.heartbeat_s, found.lease_s) == (5.0, 15.0)


@pytest.mark.parametrize("variables", [{"TTP_HEARTBEAT_S": "1"}, {"TTP_LEASE_S": "3"}])
def test_a_heartbeat_of_a_small_job_is_warned_of_in_a_large_one(variables: dict[str, str]) -> None:
    """The time of a lease alone brings the heartbeat of a small job too."""
    found = Settings.from_env({**variables, "WORLD_SIZE": "10000"})
    line = heartbeat_warning(found.heartbeat_s, 10_000)
    assert "every 1 s from 10000 ranks" in line and "expected 5 s or more" in line
    assert list(_warnings(torch.device("cpu"), found, 0, 10_000)) == [line]
    assert not list(_warnings(torch.device("cpu"), found, 8, 10_000))
    assert heartbeat_warning(found.heartbeat_s, 2_000) == ""
    assert heartbeat_warning(Settings.from_env({"WORLD_SIZE": "10000"}).heartbeat_s, 10_000) == ""
