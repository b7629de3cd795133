"""A pytest fixture: `chaos(command, faults)` runs a job under faults and fails the test unless everything held.

pytest_plugins = ["ttp.chaos.fixture"]           # in conftest.py

def test_my_job_survives(chaos):
    chaos(["ttprun", "--nproc-per-node", "2", "train.py", "--output", "{output}"], [{"fault": "kill", "point": "updating"}])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ttp.chaos.faults.scenario import parse_scenario
from ttp.chaos.report.result_json import write_result
from ttp.chaos.run.campaign import Campaign, run_campaign
from ttp.chaos.verdict.invariants import VIOLATED

RunChaos = Callable[..., Campaign]


@pytest.fixture
def chaos(tmp_path: Path, request: pytest.FixtureRequest) -> RunChaos:
    """Return `run(command, faults, **fields)`: faults and fields are a scenario's; returns the campaign for a closer look."""

    def run(command: Sequence[str], faults: Sequence[Mapping[str, Any]], **fields: Any) -> Campaign:
        name = request.node.name
        scenario = parse_scenario({"name": name, **fields, "faults": [dict(fault) for fault in faults]}, name)
        print(f"chaos: seed {scenario.seed}")
        *_, campaign = run_campaign(scenario, command, tmp_path / "chaos")
        write_result(campaign)
        problems = [f"{v.name}: {v.text}" for one in campaign.runs for v in one.verdicts if v.state == VIOLATED]
        problems += [
            f"did not happen: {one.text}: {len(one.firings)} of {one.planned} injections"
            for one in campaign.incidents
            if not one.complete
        ]
        if problems:
            console = "\n".join(
                (one.folder / "console.log").read_text(errors="replace")[-6000:] for one in campaign.runs
            )
            pytest.fail("\n".join([f"seed {scenario.seed}", *problems, console]), pytrace=False)
        return campaign

    return run
