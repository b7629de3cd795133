"""A scenario is read strictly: what is wrong is named with what was got and what was expected, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ttp.chaos.faults.scenario import (
    FAULT_FIELDS,
    KINDS,
    OUTCOMES,
    SCENARIO_FIELDS,
    Moment,
    load_scenario,
    parse_scenario,
)
from ttp.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "chaos"
TEXT = """
name: several
seed: 7
repeat: 2
faults:
  - {fault: kill, rank: 2, step: 12, point: updating}
  - fault: kill
    rank: [0, 3]
    after_s: [0.5, 2]
    then:
      - {fault: kill, rank: 1, event: write_sent}
      - fault: corrupt
  - {fault: stop, for_s: 1, repeat: 2, expect: unharmed}
"""


def test_a_scenario_says_what_happens_when_and_to_whom(tmp_path: Path) -> None:
    """Ranks, moments, points, further faults and repeats are those of the file."""
    path = tmp_path / "scenario.yaml"
    path.write_text(TEXT)
    scenario = load_scenario(path)
    assert (scenario.name, scenario.seed, len(scenario.faults)) == ("several", 7, 8)
    kill, two, stop, again = scenario.faults[:4]
    assert kill.ranks == (2,) and kill.moment == Moment(step=12) and kill.point == "updating"
    assert two.ranks == (0, 3) and two.moment == Moment(after_s=(0.5, 2.0)) and two.point == "now"
    assert [one.moment.event for one in two.then] == ["write_sent", "published"]
    assert two.outcomes == ("fell_back",) and stop == again and stop.outcomes == ("unharmed",)
    assert stop.ranks == () and stop.count == 1 and stop.text == "stop of rank random"
    assert two.text == "kill of ranks 0, 3, then kill of rank 1, then corrupt"


def test_a_node_is_named_by_its_number_or_by_a_rank_on_it() -> None:
    """And the fault's text shows it."""
    faults = [
        {"fault": "lose_node", "node": 1},
        {"fault": "lose_node", "rank": 0},
        {"fault": "kill_agent", "rank": 3},
        {"fault": "lose_node"},
    ]
    scenario = parse_scenario({"faults": faults, "nodes": 2}, "here")
    reported = ["node 1", "the node of rank 0", "the node of rank 3", "node random"]
    assert [fault.text.partition(" of ")[2] for fault in scenario.faults] == reported
    with pytest.raises(ConfigError, match="lose_node of node 2, got nodes: 2, expected a node from 0 to 1"):
        parse_scenario({"faults": [{"fault": "lose_node", "node": 2}], "nodes": 2}, "here")


def test_every_kind_can_be_asked_for_by_its_name_and_what_it_wants() -> None:
    """No kind of the list needs a field that a scenario cannot have."""
    for name, kind in KINDS.items():
        fields = {"for_s": 1, "mib": 64, "ms": 20}
        fault: dict[str, Any] = {"fault": name, **{field: fields[field] for field in kind.wants}}
        (spec,) = parse_scenario({"faults": [fault], "nodes": 2, "small_disk_mib": 8}, "here").faults
        assert spec.kind == name and set(spec.outcomes) == set(kind.outcomes)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"fault": "burn"}, "fault: got 'burn', expected one of kill, stop"),
        ({"fault": "kill", "rank": -1}, "rank: got -1, expected a rank from 0"),
        ({"fault": "kill", "rank": [1, 1]}, "expected each rank once"),
        ({"fault": "kill", "step": 3, "after_s": 1}, "got step and after_s, expected one of them"),
        ({"fault": "kill", "step": 0}, "step: got 0, expected an integer from 1 to"),
        ({"fault": "kill", "after_steps": [5, 2]}, "least <= most"),
        ({"fault": "kill", "point": "lunch"}, "point: got 'lunch', expected one of now, backward"),
        ({"fault": "slow"}, "no for_s"),
        ({"fault": "corrupt", "rank": 1}, "it hits no rank"),
        ({"fault": "kill", "colour": "red"}, "unknown field 'colour'"),
        ({"fault": "kill", "expect": "fine"}, "expect: got 'fine', expected some of saved"),
        ({"fault": "kill", "then": [{"fault": "kill", "event": "lunch"}]}, "then 1 \\(kill\\): event: got 'lunch'"),
        ({"fault": "kill", "then": [{"fault": "kill", "then": []}]}, "a `then` within a `then`"),
        ({"fault": "partition", "for_s": 2}, "needs several nodes, got nodes: 0"),
        ({"fault": "kill_agent", "node": 1}, "kill_agent of node 1, got nodes: 0, expected a node from 0 to 0"),
        ({"fault": "kill_agent", "node": 0, "rank": 1}, "got node and rank, expected one of them"),
        ({"fault": "kill_agent", "rank": [0, 1]}, r"rank: got \[0, 1\], expected an integer from 0"),
        ({"fault": "kill_agent", "count": 2}, "it hits no rank"),
        ({"fault": "fill_disk", "for_s": 2}, "got small_disk_mib: 0"),
        ({"fault": "kill", "after_s": float("nan")}, "after_s: got nan, expected a finite number >= 0"),
        ({"fault": "stop", "for_s": float("inf")}, "for_s: got inf, expected a finite number >= 0"),
        ({"fault": "kill", "event": "published"}, "event 'published' outside of `then`"),
        ({"fault": "kill", "rank": 1, "count": 5}, "count beside rank: 1"),
        (
            {"fault": "kill", "point": "backward", "call": 1},
            "call: got point 'backward', expected point write or publish",
        ),
        ("kill", "expected names with values"),
    ],
)
def test_a_wrong_fault_is_refused_with_its_place_and_what_was_expected(fault: object, expected: str) -> None:
    """The message leads to the line to correct."""
    with pytest.raises(ConfigError, match=expected):
        parse_scenario({"faults": [fault]}, "here.yaml")


@pytest.mark.parametrize("limit", [0, -1, float("nan"), "much", True])
def test_a_limit_of_growth_is_a_number_above_nothing(limit: object) -> None:
    """32 MiB where nothing is said."""
    faults = [{"fault": "kill"}]
    assert parse_scenario({"faults": faults}, "here").growth_mib == 32.0
    assert parse_scenario({"faults": faults, "growth_mib": 512}, "here").growth_mib == 512.0
    with pytest.raises(ConfigError, match=r"growth_mib: got .*, expected a (finite )?number"):
        parse_scenario({"faults": faults, "growth_mib": limit}, "here.yaml")


def test_a_wrong_file_is_refused_by_name(tmp_path: Path) -> None:
    """Not there, not YAML, no faults."""
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_scenario(tmp_path / "none.yaml")
    path = tmp_path / "wrong.yaml"
    path.write_text("faults: [")
    with pytest.raises(ConfigError, match=r"wrong\.yaml: invalid YAML: line 1"):
        load_scenario(path)
    path.write_text("faults: [{fault: kill, rank: 1, rank: 2}]")
    with pytest.raises(ConfigError, match="key 'rank' is given twice"):
        load_scenario(path)
    path.write_text("{faults: [{fault: kill}], environ: {B: [1]}}")
    with pytest.raises(ConfigError, match=r"environ B: got \[1\], expected a string or a number"):
        load_scenario(path)
    path.write_text("name: nothing")
    with pytest.raises(ConfigError, match="faults: got None, expected a list"):
        load_scenario(path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_scenario(path: Path) -> None:
    """What the documentation points to can be run as it stands."""
    scenario = load_scenario(path)
    assert scenario.name and scenario.faults


def test_the_documentation_names_every_kind_and_every_field() -> None:
    """A kind that is added is explained."""
    text = (EXAMPLES.parents[1] / "docs" / "chaos.md").read_text()
    missing = [name for name in (*KINDS, *SCENARIO_FIELDS, *FAULT_FIELDS, *OUTCOMES) if f"`{name}`" not in text]
    assert not missing
