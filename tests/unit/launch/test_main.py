"""What the launcher says of the whole job when its own agent has ended."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.launcher.api import LaunchConfig

from ttp.launch import main
from ttp.launch.attempts.context import LaunchContext
from ttp.launch.report.reporter import Reporter


class Ended:
    """An agent whose workers have all succeeded."""

    def run(self) -> RunResult:
        return RunResult(state=WorkerState.SUCCEEDED, return_values={0: None})

    def get_event_succeeded(self) -> None: ...


class Meeting:
    """The rendezvous, and what was said there."""

    def __init__(self, said: str) -> None:
        self.failed_elsewhere = lambda: said

    def shutdown(self, why: str) -> None: ...


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("", "succeeded"),
        ("b: exit code 3", "succeeded on this node, but another one ended with a failure: b: exit code 3"),
    ],
)
def test_a_node_that_has_succeeded_does_not_speak_for_one_that_failed(
    said: str, result: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary is printed where rank 0 was, whose node may hear of the failure only."""
    reporter = Reporter()
    reporter.begin(here=True)
    agent: Any = Ended()
    meeting: Any = Meeting(said)
    monkeypatch.setattr(main, "make_rendezvous", lambda config: meeting)
    monkeypatch.setattr(main, "make_agent", lambda *arguments: agent)
    monkeypatch.setattr("torch.distributed.elastic.events.record", lambda *arguments: None)
    nobody: Any = None
    launching = LaunchContext(
        total_timeout_s=1.0, poll_s=1.0, open_link=nobody, request_shutdown=nobody, reporter=reporter
    )
    config = LaunchConfig(min_nodes=1, max_nodes=2, nproc_per_node=1, run_id="job")
    assert main.launch(config, "true", [], launching) == {0: None}
    assert f"result  {result}\n" in capsys.readouterr().err


def test_the_other_nodes_are_told_of_the_end_though_the_summary_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal may come while it is told: the rendezvous is closed all the same."""
    told: list[str] = []
    meeting: Any = Meeting("")
    meeting.shutdown = told.append

    class Interrupted(Reporter):
        def finish(self, result: str, why: str = "") -> None:
            raise KeyboardInterrupt

    agent: Any = Ended()
    monkeypatch.setattr(main, "make_rendezvous", lambda config: meeting)
    monkeypatch.setattr(main, "make_agent", lambda *arguments: agent)
    monkeypatch.setattr("torch.distributed.elastic.events.record", lambda *arguments: None)
    nobody: Any = None
    launching = LaunchContext(
        total_timeout_s=1.0, poll_s=1.0, open_link=nobody, request_shutdown=nobody, reporter=Interrupted()
    )
    config = LaunchConfig(min_nodes=1, max_nodes=2, nproc_per_node=1, run_id="job")
    with pytest.raises(KeyboardInterrupt):
        main.launch(config, "true", [], launching)
    assert told == [""]
