"""What ttprun reports of the job when its agent has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.launcher.api import LaunchConfig

from ttp.launch import main
from ttp.launch.attempts.context import LaunchContext
from ttp.launch.report.reporter import Reporter


class Ended:
    """An agent whose workers have all succeeded."""

    seat = SimpleNamespace(report_others=lambda: None)

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
        ("b: exit code 3", "succeeded on this node, but failed on another node: b: exit code 3"),
    ],
)
def test_a_node_that_has_succeeded_does_not_speak_for_one_that_failed(
    said: str, result: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary is printed on rank 0's node, which may only learn of the failure."""
    reporter = Reporter()
    reporter.begin(here=True)
    agent: Any = Ended()
    meeting: Any = Meeting(said)
    monkeypatch.setattr(main, "make_rendezvous", lambda config, **options: meeting)
    monkeypatch.setattr(main, "make_agent", lambda *arguments: agent)
    monkeypatch.setattr("torch.distributed.elastic.events.record", lambda *arguments: None)
    unused: Any = None
    launching = LaunchContext(
        total_timeout_s=1.0, poll_s=1.0, open_link=unused, request_shutdown=unused, reporter=reporter
    )
    config = LaunchConfig(min_nodes=1, max_nodes=2, nproc_per_node=1, run_id="job")
    assert main.launch(config, "true", [], launching) == {0: None}
    assert f"result  {result}\n" in capsys.readouterr().err


def test_the_rendezvous_is_closed_though_the_summary_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal may come while it is printed: the rendezvous is closed all the same."""
    published: list[str] = []
    meeting: Any = Meeting("")
    meeting.shutdown = published.append

    class Interrupted(Reporter):
        def finish(self, result: str, why: str = "") -> None:
            raise KeyboardInterrupt

    agent: Any = Ended()
    monkeypatch.setattr(main, "make_rendezvous", lambda config, **options: meeting)
    monkeypatch.setattr(main, "make_agent", lambda *arguments: agent)
    monkeypatch.setattr("torch.distributed.elastic.events.record", lambda *arguments: None)
    unused: Any = None
    launching = LaunchContext(
        total_timeout_s=1.0, poll_s=1.0, open_link=unused, request_shutdown=unused, reporter=Interrupted()
    )
    config = LaunchConfig(min_nodes=1, max_nodes=2, nproc_per_node=1, run_id="job")
    with pytest.raises(KeyboardInterrupt):
        main.launch(config, "true", [], launching)
    assert published == [""]
