"""Real ranks get real SIGKILLs at chosen places of a step; the job must come back and equal one that nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, RunJob, killed_together, run_to_end
from ttp.chaos.observed.training_job import Observed, TrainingJob
from ttp.chaos.verdict.timeline import compare
from ttp.controller.replay import compare as replay_compare
from ttp.controller.replay import main as replay

DECISIONS = ["death_seen", "freeze_sent", "frozen", "decided", "write_sent", "publish_sent", "published", "exit_sent"]

KILLS = (
    "kill:rank=1,step=3,point=backward,round=0",
    "kill:rank=2,step=6,point=ready,round=1",
    "kill:rank=3,step=9,point=record,round=2",
    "kill:rank=0,step=12,point=updating,round=3",
    "kill:rank=1,step=15,point=done,round=4",
    "kill:rank=0,step=18,point=gathering,round=5",
)
"""One kill in each place of a step, over all ranks, an attempt each."""


@pytest.fixture(scope="module")
def killed_job(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """Return the finished job of four ranks that was killed at every point of a step (KILLS)."""
    return run_to_end(tmp_path_factory.mktemp("killed") / "dp4", 4, faults=";".join(KILLS), restarts=len(KILLS))


def published_steps(job: TrainingJob) -> list[int]:
    """Return the step that each attempt of the job published, in order."""
    lines = [line for journal in job.journals() for line in journal if line.get("event") == "published"]
    return [int(line["step"]) for line in lines]


def logged_by_the_agent(job: TrainingJob, words: str) -> list[str]:
    """Return the agent's own lines with these words."""
    lines = (job.output_dir / "console.log").read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith("[ttprun") and words in line]


def assert_equal(faulted: Observed, whole: Observed) -> None:
    verdict = compare(faulted.metrics(), whole.metrics(), faulted.final(), whole.final())
    assert verdict.equal, "\n".join(verdict.differences[:10])


def test_kill_at_every_point_of_a_step_loses_nothing(killed_job: TrainingJob, whole_job: RunJob) -> None:
    """Six kills, one in each place, over all ranks; before the record is out step t-1 is saved, afterwards step t.

    From `record` on the dead rank had the record; whether a survivor had it too is a race of the collective, so both t-1
    and t are right there. A gather has only begun where the rank is killed in it: nothing has come of it from anybody.
    """
    steps = published_steps(killed_job)
    assert len(steps) == len(KILLS), killed_job.console_tail(80)
    assert steps[0] == 2 and steps[1] == 5
    assert steps[2] in (8, 9) and steps[3] in (11, 12)
    assert steps[4] in (14, 15) and steps[5] in (17, 18)
    assert_equal(killed_job, whole_job(4))


def test_journals_of_killed_ranks_replay_to_the_same_decisions(
    killed_job: TrainingJob, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks, one killed in each attempt: freeze, step, roll-forward, writers and publisher come out as they did."""
    paths = sorted((killed_job.output_dir / "log").glob("journal_*.jsonl"))
    assert len(paths) == len(KILLS) + 1, "the attempts with a kill, and one that finished"
    for path in paths:
        compared = replay_compare(path)
        assert compared.difference == ""
        assert compared.recorded, path
    for path in paths[:-1]:
        faulted = [line for line in replay_compare(path).again if line.event in DECISIONS]
        assert [name for name in DECISIONS if name in {line.event for line in faulted}] == DECISIONS
        (decided,) = [line for line in faulted if line.event == "decided"]
        (published,) = [line for line in faulted if line.event == "published"]
        assert decided.fields["step"] == published.fields["step"]
    assert replay([str(paths[0]), "--sent"]) == 0
    printed = capsys.readouterr().out
    assert "Freeze to" in printed and "WriteOrder to" in printed and "the replay decides the same" in printed


@pytest.mark.parametrize(
    ("ranks", "victim"),
    [
        pytest.param(2, 0, marks=pytest.mark.long),
        pytest.param(3, 2, marks=pytest.mark.long),
        pytest.param(5, 4, marks=pytest.mark.long),
        pytest.param(8, 0, marks=pytest.mark.long),
    ],
)
def test_every_data_parallel_size_survives_a_kill(tmp_path: Path, whole_job: RunJob, ranks: int, victim: int) -> None:
    """Even sizes by halves, odd ones by the ring; rank 0 is not an exception."""
    faulted = run_to_end(tmp_path / "faulted", ranks, faults=f"kill:rank={victim},step=7,point=updating")
    assert published_steps(faulted)[0] in (6, 7)
    assert_equal(faulted, whole_job(ranks))


@pytest.mark.long
def test_an_exception_and_then_a_silent_rank_are_persisted_and_survived(tmp_path: Path, whole_job: RunJob) -> None:
    """The rank that raised is still a holder, and its traceback is reported. SIGSTOP sends nothing and closes nothing: only the
    lease shows it."""
    faults = "raise:rank=1,step=5,point=backward,round=0;stop:rank=1,step=9,point=ready,round=1"
    faulted = run_to_end(tmp_path / "faulted", 2, faults=faults)
    raised, silent = published_steps(faulted)
    assert raised == 4 and silent in (8, 9)
    assert "fault injected at backward" in (faulted.output_dir / "log" / "rank_1" / "error.log").read_text()
    console = faulted.console_tail(10_000)
    assert "--- fault in attempt 0: an exception ---" in console and "raise InjectedFault(" in console
    assert "cause   InjectedFault: rank 1, step 5: fault injected at backward" in console
    assert "killed rank 1 (stopped): these ranks have nothing more to save" in console
    assert "no exit within" not in console
    assert_equal(faulted, whole_job(2))


@pytest.mark.long
def test_an_update_longer_than_a_freeze_waits_is_saved_when_it_is_the_last_holders(
    tmp_path: Path, whole_job: RunJob
) -> None:
    """Rank 1 dies behind step 9 while rank 0 is in the middle of its update for 8 s: the step is waited for, and not lost."""
    begun = "slow:rank=0,step=9,point=updating,for=8;slow:rank=1,step=9,point=updating,for=1"  # rank 0 has the record by then
    faults = f"{begun};kill:rank=1,step=9,point=done"
    faulted = run_to_end(tmp_path / "faulted", 2, faults=faults)
    assert [line["ranks"] for line in faulted.journals()[0] if line["event"] == "awaiting_updates"] == [[0]]
    assert published_steps(faulted) == [9]
    assert_equal(faulted, whole_job(2))


def test_all_holders_of_a_shard_gone_is_refused_by_name(tmp_path: Path, whole_job: RunJob) -> None:
    """Ranks 0 and 2 hold the same half of the shards: the job says so and goes on from the periodic checkpoint."""
    faulted = killed_together(tmp_path / "faulted", 4, (0, 2), 9, "--training_config.save_interval=6")
    refused = [line for journal in faulted.journals() for line in journal if line.get("event") == "refused"]
    assert len(refused) == 1
    reason = str(refused[0]["reason"])
    assert "shard" in reason and "0" in reason and "2" in reason
    (reported,) = logged_by_the_agent(faulted, "the ranks leave")
    assert reason in reported and f"the job goes on from {faulted.output_dir}/checkpoints/iter_0000006" in reported
    resumes = [line for line in faulted.metrics() if line.get("event") == "resume"]
    assert [int(line["from_step"]) for line in resumes] == [6]
    assert_equal(faulted, whole_job(4))


@pytest.mark.long
def test_the_agent_logs_why_nothing_was_saved_although_no_rank_remains(tmp_path: Path) -> None:
    faulted = killed_together(tmp_path / "faulted", 2, (0, 1), 9, "--training_config.save_interval=6")
    assert [int(line["from_step"]) for line in faulted.metrics() if line.get("event") == "resume"] == [6]
    (reported,) = logged_by_the_agent(faulted, "the ranks leave")
    assert "no dying-gasp checkpoint: all ranks are dead" in reported


@pytest.mark.long
def test_without_ttp_a_kill_is_what_torchrun_makes_of_it(tmp_path: Path) -> None:
    """ENABLE_TTP=False: no controller, no journal, no dying gasp."""
    with TrainingJob(
        tmp_path / "plain",
        ranks=2,
        overrides=("--training_config.training_iters=8",),
        environ={"ENABLE_TTP": "False", "TTP_FAULTS": "kill:rank=1,step=5,point=ready"},
    ) as job:
        assert job.wait(JOB_S) == 1
    assert job.journals() == []
    assert not list(job.output_dir.rglob("iter_*"))
    assert job.leftovers() == []
