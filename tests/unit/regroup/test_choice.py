"""Whether a lost rank is replaced in place: what is against it is named at the start."""

from __future__ import annotations

from typing import Any

import pytest

import ttp.regroup.choice as module
from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.groups.process_groups import GROUPS
from ttp.optim.on_divergence import OnDivergence
from ttp.regroup.choice import check_asked, choose, why_not_in_place


class Optimizer:
    device = type("Device", (), {"type": "cpu"})()
    spans_job = True

    def fill(self, replaced: Any) -> None:
        raise AssertionError("nothing is filled here")


class Kept:
    def __init__(self, why: str) -> None:
        self.why = why

    def why_not(self) -> str:
        return self.why


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process counts as one that ttprun has forked."""
    monkeypatch.setattr(module, "is_forked", lambda: True)


def in_place(**settings: Any) -> Settings:
    return Settings(**{"launched": True, "one_node": True, **settings})


@pytest.mark.parametrize(
    ("settings", "asked", "why"),
    [
        ({}, True, ""),
        ({"in_place": "on"}, False, ""),
        ({}, False, "the program has not asked"),
        ({"in_place": "off"}, True, "TTP_IN_PLACE=False"),
        ({"launched": False}, True, "not started by ttprun"),
        ({"one_node": False, "nodes": 2}, True, ""),
        ({"shared_dirs": False}, True, "TTP_SHARED_DIRS=False"),
        ({"in_place_s": 60.0}, True, "TTP_IN_PLACE_S=60 must be less than half of TTP_OT=120"),
        ({"in_place_s": 59.0}, True, ""),
    ],
)
def test_where_it_is_off_the_reason_is_named(
    settings: dict[str, Any], asked: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GROUPS, "replaceable", True)
    said = why_not_in_place(in_place(**settings), Optimizer(), asked, copies=False, own_form=False)  # type: ignore[arg-type]
    assert (why in said) if why else said == ""


@pytest.mark.parametrize(
    ("acts", "gasp", "off"), [(True, "always", True), (True, "if_needed", False), (False, "always", False)]
)
def test_a_step_is_not_on_disk_before_replicas_are_compared_that_are_to_be(
    acts: bool, gasp: str, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GROUPS, "replaceable", True)
    optimizer: Any = Optimizer()
    optimizer.on_divergence = OnDivergence("stop" if acts else "report")
    said = why_not_in_place(in_place(gasp=gasp), optimizer, True, copies=False, own_form=False)
    assert ("TTP_GASP=always has a step on disk before its replicas are compared" in said) is off


@pytest.mark.parametrize(
    ("environ", "gasp"),
    [
        ({}, "if_needed"),
        ({"TTP_IN_PLACE": "cuda"}, "always"),
        ({"TTP_GASP": "Always"}, "always"),
        ({"TTP_IN_PLACE": "cuda", "TTP_GASP": "if_needed"}, "if_needed"),
    ],
)
def test_when_the_checkpoint_is_written(environ: dict[str, str], gasp: str) -> None:
    assert Settings.from_env(environ).gasp == gasp
    with pytest.raises(ConfigError, match="invalid TTP_GASP='sometimes': expected always or if_needed"):
        Settings.from_env({**environ, "TTP_GASP": "sometimes"})


def test_a_process_that_was_executed_says_at_its_start_that_it_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent could start no other one: the first fault would be refused."""
    monkeypatch.undo()
    said = why_not_in_place(in_place(), Optimizer(), True, copies=False, own_form=False)  # type: ignore[arg-type]
    assert "was executed, not forked" in said


def test_what_the_program_or_its_optimizer_does_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adopted(Optimizer):
        def why_not_filled(self) -> str:
            return "no other rank holds all that rank 0 has"

    monkeypatch.setattr(GROUPS, "replaceable", False)  # another test of this process may have joined a group
    said = why_not_in_place(in_place(), Adopted(), True, copies=False, own_form=False)  # type: ignore[arg-type]
    assert "the program has joined by torch.distributed.init_process_group" in said
    monkeypatch.setattr(GROUPS, "replaceable", True)
    said = why_not_in_place(in_place(), Adopted(), True, copies=False, own_form=False)  # type: ignore[arg-type]
    assert said == "no other rank holds all that rank 0 has"


def test_an_accelerator_has_to_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GROUPS, "replaceable", True)

    class OnDevice(Optimizer):
        device = type("Device", (), {"type": "cuda"})()

    said = [
        why_not_in_place(in_place(in_place=choice), OnDevice(), True, copies=False, own_form=False)  # type: ignore[arg-type]
        for choice in ("", "on", "cuda")
    ]
    assert "on cuda it is not on by itself (TTP_IN_PLACE=cuda)" in said[0] and said[1] == said[0] and said[2] == ""
    assert why_not_in_place(in_place(), Optimizer(), True, copies=True, own_form=False) == "copies='memory'"  # type: ignore[arg-type]


RESTART = "a rank that dies costs a checkpoint and a restart: "
NEVER = "train() was not rehearsed yet"


@pytest.mark.parametrize(
    ("asked", "setting", "kept", "why"),
    [
        (True, "", NEVER, NEVER),
        (True, "", "", ""),
        (False, "on", NEVER, NEVER),
        (False, "cuda", NEVER, NEVER),
        ("unrehearsed", "", NEVER, ""),
        (True, "unrehearsed", NEVER, ""),
        (False, "unrehearsed", NEVER, ""),
        ("unrehearsed", "off", NEVER, "TTP_IN_PLACE=False"),
    ],
)
def test_what_was_not_rehearsed_restarts_and_the_start_says_which(
    asked: bool | str,
    setting: str,
    kept: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "ttp")
    monkeypatch.setattr(GROUPS, "replaceable", True)
    monkeypatch.setattr(module, "exchange_json", lambda value, device: [value])
    given: Any = (in_place(in_place=setting), Optimizer(), asked, Kept(kept))
    assert choose(*given, rank=0, copies=False, own_form=False) == why
    [line] = caplog.messages
    assert (
        line.endswith(f"costs a checkpoint and a restart: {why}")
        if why
        else "the others keep theirs. Until it has its state, 5 s at most, the newest step is in" in line
    )


@pytest.mark.parametrize(
    ("settings", "own_form", "ranks", "lines"),
    [
        (
            {},
            False,
            2,
            [
                f"{RESTART}the program has not asked for more (in_place=True, docs/how_in_place_works.md#your-own-program)"
            ],
        ),
        ({}, True, 2, [f"{RESTART}the trainer keeps its checkpoints, or its collectives, itself"]),
        ({"in_place": "off"}, False, 2, [f"{RESTART}TTP_IN_PLACE=False"]),
        ({}, False, 1, []),
        ({"launched": False}, False, 2, []),
        ({"enable": False}, False, 2, []),
        ({"enable": False, "in_place": "on"}, False, 2, []),
    ],
)
def test_the_start_names_what_a_death_costs_where_nothing_asks_for_more(
    settings: dict[str, Any],
    own_form: bool,
    ranks: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, by rank 0 of several ranks of ttprun's; how to have it is named only where it can be had."""
    caplog.set_level("INFO", "ttp")
    monkeypatch.setattr(GROUPS, "replaceable", True)
    monkeypatch.setattr(module, "exchange_json", lambda value, device: [value] * ranks)
    given: Any = (in_place(**settings), Optimizer(), False, Kept(""))
    for rank in range(ranks):
        choose(*given, rank=rank, copies=False, own_form=own_form)
    assert caplog.messages == lines


def test_what_is_against_it_on_one_rank_is_so_on_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else some would make their process groups again as training begins, and wait there for the others."""
    caplog.set_level("INFO", "ttp")
    monkeypatch.setattr(GROUPS, "replaceable", True)
    monkeypatch.setattr(module, "exchange_json", lambda value, device: ["", "it was executed", value])
    given: Any = (in_place(), Optimizer(), True, Kept(""))
    assert choose(*given, rank=2, copies=False, own_form=False) == "rank 1: it was executed"
    assert not caplog.messages
    choose(*given, rank=0, copies=False, own_form=False)
    assert "restart: rank 1: it was executed" in caplog.text


def test_a_process_in_a_lost_ones_place_asks_for_no_rehearsal_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may have been changed since; the others trained on with what was rehearsed."""

    def exchange(value: object, device: object) -> list[Any]:
        raise AssertionError("the others are past this")

    monkeypatch.setattr(GROUPS, "replaceable", True)
    monkeypatch.setattr(module, "vacant", lambda: 3)
    monkeypatch.setattr(module, "exchange_json", exchange)
    given: Any = (in_place(), Optimizer(), True, Kept(NEVER))
    assert choose(*given, rank=0, copies=False, own_form=False) == ""


@pytest.mark.parametrize("asked", ["yes", "True", 1, None, ""])
def test_what_in_place_cannot_be_is_refused(asked: object) -> None:
    with pytest.raises(ConfigError, match=r"invalid in_place: got .*expected True, False or 'unrehearsed'"):
        check_asked(asked)


@pytest.mark.parametrize(
    ("text", "said"), [("Unrehearsed", "unrehearsed"), ("cuda", "cuda"), ("true", "on"), ("0", "off"), (" ", "")]
)
def test_the_setting_is_read(text: str, said: str) -> None:
    assert Settings.from_env({"TTP_IN_PLACE": text}).in_place == said


def test_a_setting_that_is_none_of_these_is_refused() -> None:
    with pytest.raises(ConfigError, match="invalid TTP_IN_PLACE='maybe': expected True or False, unrehearsed or cuda"):
        Settings.from_env({"TTP_IN_PLACE": "maybe"})
