"""What a fault's end says of the checkpoint that the job goes on from, and of the steps that are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, registration, report
from tests.unit.protocol.test_controller_members import killed
from tests.unit.protocol.test_incident import ended, save
from tests.unit.protocol.test_takeover import coming, standby
from ttp.controller.core.dump.finish import learn_checkpoint
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import Exit, Phase


def test_no_step_is_lost_where_a_later_one_than_the_saved_is_on_disk() -> None:
    job = ControllerBench()
    job.say(killed(3))
    found = save(job, (0, 1, 2), checkpoint="/c/iter_0000008", records=(8,))
    assert (found.goes_on_from, found.steps_lost) == ("/c/iter_0000008", 0)


def test_of_two_checkpoints_of_one_step_the_job_goes_on_from_the_one_that_was_saved() -> None:
    job = ControllerBench()
    job.say(killed(3))
    found = save(job, (0, 1, 2), checkpoint="/c/iter_0000006", records=(8,))
    assert (found.goes_on_from, found.steps_lost) == ("/a/iter_0000006", 2)


def test_the_first_checkpoint_of_a_step_that_is_reported_is_kept() -> None:
    state = learn_checkpoint(ControllerBench().state, "/a/iter_0000006")
    assert learn_checkpoint(state, "/b/iter_0000006") is state
    assert learn_checkpoint(state, "/b/iter_0000007").checkpoint == "/b/iter_0000007"


@pytest.mark.parametrize(
    ("checkpoint", "goes_on", "lost"),
    [
        ("/c/iter_0000006", "the job goes on from /c/iter_0000006", 2),
        ("", "no rank has reported an older checkpoint", 8),
    ],
)
def test_a_refusal_counts_the_steps_since_the_newest_checkpoint_or_since_the_beginning(
    checkpoint: str, goes_on: str, lost: int
) -> None:
    job = ControllerBench()
    job.say(killed(0), killed(2))
    for rank in (1, 3):
        job.say(report(rank, 1, Phase.COMPUTE, 9, records=(7, 8), checkpoint=checkpoint))
    assert job.sent(Exit)[1].reason.endswith(f"; {goes_on}")
    found = ended(job)
    assert (found.goes_on_from, found.steps_lost) == (checkpoint, lost)


@pytest.mark.parametrize(("checkpoint", "lost"), [("/c/iter_0000006", 2), ("", 8)])
def test_so_does_an_end_at_which_no_rank_can_receive_an_order(checkpoint: str, lost: int) -> None:
    job = ControllerBench()
    job.say(killed(3))
    for rank in (0, 1, 2):
        job.say(report(rank, 1, Phase.COMPUTE, 9, records=(7, 8), checkpoint=checkpoint))
    assert job.at(Stage.WRITING)
    job.close(0, 1, 2)
    job.wait(20.0, senders=())
    assert job.at(Stage.OVER)
    found = ended(job)
    assert (found.saved, found.goes_on_from, found.steps_lost) == (None, checkpoint, lost)


def test_what_is_lost_is_not_known_where_no_rank_has_answered_the_freeze() -> None:
    """Nor has the dead rank ever come to this controller."""
    job = standby()
    job.say(killed(3), *(coming(rank) for rank in range(3)))
    job.wait(job.state.settings.freeze_timeout_s + 1.0, senders=(0, 1, 2))
    assert job.sent(Exit) and job.logged("refused")
    assert (ended(job).steps_lost, ended(job).survivors) == (None, ())


@pytest.mark.parametrize("checkpoint", ["/c/iter_0000006", ""])
@pytest.mark.parametrize("receives", [True, False])
def test_what_is_lost_is_not_known_where_the_trainer_writes_checkpoints_of_its_own(
    checkpoint: str, receives: bool
) -> None:
    """A newer one than any that was reported may be on disk."""
    job = ControllerBench(assembled=False)
    job.say(*(replace(registration(rank), own_checkpoints=True) for rank in range(4)))
    job.say(killed(0), *([killed(2)] if receives else []))
    for rank in (1, 3) if receives else (1, 2, 3):
        job.say(report(rank, 1, Phase.COMPUTE, 9, records=(7, 8), checkpoint=checkpoint))
    if receives:
        assert job.sent(Exit)[1].reason.endswith(
            "; the job goes on from the trainer's newest checkpoint, if it has one"
        )
    else:
        job.close(1, 2, 3)
        job.wait(20.0, senders=())
        assert job.at(Stage.OVER)
    found = ended(job)
    assert (found.saved, found.goes_on_from, found.steps_lost) == (None, checkpoint, None)


def test_no_step_is_lost_before_the_first_update() -> None:
    job = ControllerBench()
    job.say(killed(0), killed(2))
    for rank in (1, 3):
        job.say(report(rank, 1, Phase.COMPUTE, 1))
    assert ended(job).steps_lost == 0
