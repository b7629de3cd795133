"""How often a job's ranks send heartbeats and whether relays carry them: by its size, and by what its variables ask for."""

from __future__ import annotations

import pytest
import torch

from ttp.config import Settings, relay
from ttp.errors import ConfigError
from ttp.heartbeats import heartbeat_warning, is_relayed, usual_heartbeat_s
from ttp.runtime.rank_runtime import _warnings

LAUNCHED = {"TTP_LAUNCHED": "1"}


@pytest.mark.parametrize(
    ("world_size", "alone_s", "relayed_s"),
    [
        (1, 1.0, 1.0),
        (2_000, 1.0, 1.0),
        (2_001, 1.0005, 1.0),
        (5_000, 2.5, 1.0),
        (10_000, 5.0, 1.0),
        (10_001, 5.0, 1.0001),
        (20_000, 5.0, 2.0),
        (50_000, 5.0, 5.0),
        (1_000_000, 5.0, 5.0),
    ],
)
def test_heartbeats_are_rarer_from_as_many_ranks_on_as_one_controller_takes(
    world_size: int, alone_s: float, relayed_s: float
) -> None:
    """Five times as many of them come by relays; however many ranks there are, a dump must fit into TTP_OT."""
    assert usual_heartbeat_s(world_size) == usual_heartbeat_s(world_size, False) == pytest.approx(alone_s, abs=1e-9)
    assert usual_heartbeat_s(world_size, True) == pytest.approx(relayed_s, abs=1e-9)


@pytest.mark.parametrize("relayed", [False, True])
def test_what_is_usual_is_never_warned_of(relayed: bool) -> None:
    for world_size in (1, 2_000, 2_001, 3_333, 10_000, 10_001, 77_777, 1_000_000):
        usual_s = usual_heartbeat_s(world_size, relayed)
        assert 1.0 <= usual_s <= 5.0
        assert heartbeat_warning(usual_s, world_size, relayed) == ""
        assert heartbeat_warning(60.0, world_size, relayed) == ""


@pytest.mark.parametrize(
    ("relayed", "world_size", "expected"),
    [
        (False, 4_000, ("from 4000 ranks", "expected 2 s or more", "takes some 2000 a second")),
        (False, 10_000, ("from 10000 ranks", "expected 5 s or more", "takes some 2000 a second")),
        (True, 20_000, ("from 20000 ranks", "expected 2 s or more", "takes some 10000 a second")),
        (True, 50_000, ("from 50000 ranks", "expected 5 s or more", "takes some 10000 a second")),
    ],
)
def test_more_heartbeats_than_one_controller_takes_are_warned_of(
    relayed: bool, world_size: int, expected: tuple[str, ...]
) -> None:
    line = heartbeat_warning(1.5, world_size, relayed)
    assert "a heartbeat every 1.5 s" in line and "Unset both" in line and "\n" not in line
    assert [part for part in expected if part not in line] == []


def test_a_heartbeat_that_is_fine_by_relays_is_warned_of_without_them() -> None:
    assert heartbeat_warning(1.0, 10_000, True) == ""
    assert heartbeat_warning(1.0, 10_000, False) == heartbeat_warning(1.0, 10_000) != ""
    assert heartbeat_warning(1.0, 2_000) == heartbeat_warning(1.0, 2_000, True) == ""


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        (None, {1: False, 2_000: False, 2_001: True, 10_000: True}),
        (True, dict.fromkeys((1, 2_000, 2_001, 10_000), True)),
        (False, dict.fromkeys((1, 2_000, 2_001, 10_000), False)),
    ],
)
def test_a_large_job_is_relayed_unless_it_is_asked_for_otherwise(asked: bool | None, sizes: dict[int, bool]) -> None:
    assert {world_size: is_relayed(asked, world_size) for world_size in sizes} == sizes


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("True", True), ("1", True), ("yes", True), (" on ", True),
        ("False", False), ("0", False), ("No", False), ("off", False),
        ("", None), ("  ", None), (None, None),
    ],
)  # fmt: skip
def test_a_job_asks_for_relays_or_refuses_them_or_leaves_it_to_its_size(value: str | None, found: bool | None) -> None:
    assert relay({} if value is None else {"TTP_RELAY": value}) is found


@pytest.mark.parametrize(
    ("environ", "relayed", "times"),
    [
        # by its size
        ({**LAUNCHED, "WORLD_SIZE": "8"}, False, (1.0, 3.0)),
        ({**LAUNCHED, "WORLD_SIZE": "2000"}, False, (1.0, 3.0)),
        ({**LAUNCHED, "WORLD_SIZE": "2001"}, True, (1.0, 3.0)),
        ({**LAUNCHED, "WORLD_SIZE": "2001", "TTP_RELAY": " "}, True, (1.0, 3.0)),
        ({**LAUNCHED, "WORLD_SIZE": "10000"}, True, (1.0, 3.0)),
        ({**LAUNCHED, "WORLD_SIZE": "20000"}, True, (2.0, 6.0)),
        ({**LAUNCHED, "WORLD_SIZE": "100000"}, True, (5.0, 15.0)),
        # as it asks
        ({**LAUNCHED, "WORLD_SIZE": "2000", "TTP_RELAY": "True"}, True, (1.0, 3.0)),
        ({**LAUNCHED, "WORLD_SIZE": "10000", "TTP_RELAY": "True"}, True, (1.0, 3.0)),
        ({**LAUNCHED, "WORLD_SIZE": "2001", "TTP_RELAY": "False"}, False, (1.0005, 3.0015)),
        ({**LAUNCHED, "WORLD_SIZE": "10000", "TTP_RELAY": "False"}, False, (5.0, 15.0)),
        # no agent of ttprun is there to relay
        ({"WORLD_SIZE": "2001"}, False, (1.0005, 3.0015)),
        ({"WORLD_SIZE": "10000"}, False, (5.0, 15.0)),
        ({"WORLD_SIZE": "10000", "TTP_RELAY": "True"}, False, (5.0, 15.0)),
        ({"WORLD_SIZE": "10000", "TTP_LAUNCHED": ""}, False, (5.0, 15.0)),
        # and a time that is set holds
        ({**LAUNCHED, "WORLD_SIZE": "10000", "TTP_HEARTBEAT_S": "4"}, True, (4.0, 12.0)),
        ({**LAUNCHED, "WORLD_SIZE": "10000", "TTP_LEASE_S": "9"}, True, (1.0, 9.0)),
        ({**LAUNCHED, "WORLD_SIZE": "20000", "TTP_LEASE_S": "4.5"}, True, (1.5, 4.5)),
        ({**LAUNCHED, "WORLD_SIZE": "10000", "TTP_RELAY": "False", "TTP_LEASE_S": "6"}, False, (2.0, 6.0)),
    ],
)
def test_the_heartbeats_of_a_job_follow_from_its_size_and_its_relays(
    environ: dict[str, str], relayed: bool, times: tuple[float, float]
) -> None:
    settings = Settings.from_env(environ)
    assert settings.relayed is relayed
    assert (settings.heartbeat_s, settings.lease_s) == pytest.approx(times, abs=1e-9)


@pytest.mark.parametrize("value", ["maybe", "2", "-1", "truth", "relay", "True False", "no\nrelay"])
def test_a_relay_that_is_neither_asked_for_nor_refused_is_an_error_in_one_line(value: str) -> None:
    """By its name and its value, with what was expected."""
    expected = r"^invalid TTP_RELAY=[^\n]+: expected True or False[^\n]*$"
    for world_size in ("1", "2001"):
        with pytest.raises(ConfigError, match=expected) as refused:
            Settings.from_env({**LAUNCHED, "WORLD_SIZE": world_size, "TTP_RELAY": value})
        assert value.partition("\n")[0] in str(refused.value)
    with pytest.raises(ConfigError, match=expected):  # as ttprun reads it
        relay({"TTP_RELAY": value})


def test_a_rank_finds_its_nodes_relay_by_a_variable() -> None:
    """A node whose relay cannot be had sets none; its ranks' heartbeats are as rare as those of the others."""
    large = {**LAUNCHED, "WORLD_SIZE": "10000"}
    for value, path in (("/tmp/r/1", "/tmp/r/1"), (" /tmp/r/1 ", "/tmp/r/1"), ("", ""), (" ", "")):
        settings = Settings.from_env({**large, "TTP_RELAY_SOCKET": value})
        assert (settings.relay, settings.relayed, settings.heartbeat_s) == (path, True, 1.0)
    assert Settings.from_env(large).relay == ""
    with pytest.raises(ConfigError, match=r"TTP_RELAY_SOCKET[^\n]*$"):
        Settings.from_env({**large, "TTP_RELAY_SOCKET": "/tmp/\udcff"})


@pytest.mark.parametrize(("environ", "warned"), [(LAUNCHED, False), ({}, True), ({**LAUNCHED, "TTP_RELAY": "0"}, True)])
def test_a_job_with_relays_is_not_warned_of_a_heartbeat_a_second(environ: dict[str, str], warned: bool) -> None:
    settings = Settings.from_env({**environ, "WORLD_SIZE": "10000", "TTP_HEARTBEAT_S": "1"})
    lines = list(_warnings(torch.device("cpu"), settings, 0, 10_000))
    assert lines == ([heartbeat_warning(1.0, 10_000)] if warned else [])
