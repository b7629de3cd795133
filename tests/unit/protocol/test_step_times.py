"""A rank measures its own steps, and reports each once."""

from __future__ import annotations

from tests.unit.protocol.bench import ProcessorBench, registration
from ttp.processor.core import events
from ttp.processor.core.step_times import MOST_SHARED, StepTimes
from ttp.proto.messages import Heartbeat, Phase, Registration, Welcome


def test_a_heartbeat_carries_the_count_of_finished_steps_and_the_newest_times() -> None:
    """Each time is reported once, the newest eight at most; a registration has all that are kept."""
    rank = ProcessorBench()
    rank.receive(Welcome(1, 3, 1.0, 1000.0, ""))

    def beat(steps: int, times_s: tuple[float, ...]) -> Heartbeat:
        rank.take(events.Tick(Phase.COMPUTE, steps + 1, steps=steps, step_times_s=times_s), after=1.0)
        return rank.said(Heartbeat)[-1]

    assert beat(0, ()) == Heartbeat(1, Phase.COMPUTE, 1)
    assert beat(2, (2.0, 1.0)) == Heartbeat(1, Phase.COMPUTE, 3, steps=2, step_times_s=(2.0, 1.0))
    assert beat(2, (2.0, 1.0)).step_times_s == ()
    assert beat(3, (2.0, 1.0, 3.0)).step_times_s == (3.0,)
    many = tuple(float(number) for number in range(20))
    assert beat(23, many).step_times_s == many[-8:]
    assert beat(24, ()).step_times_s == (), "a freeze held it up"
    rank.take(events.Disconnected("broken"))
    rank.take(events.Tick(Phase.COMPUTE, 26, steps=25, step_times_s=(7.0,)), after=0.1)
    rank.take(events.Connected(registration(1)))
    assert (rank.said(Registration)[-1].steps, rank.said(Registration)[-1].step_times_s) == (25, (7.0,))
    rank.receive(Welcome(1, 3, 1.0, 1000.0, ""))
    assert beat(25, (7.0,)).step_times_s == (), "the registration had it"


def test_a_rank_measures_its_steps_but_not_what_it_does_besides() -> None:
    times = StepTimes()
    times.finish(10.0)

    def done() -> tuple[int, tuple[float, ...]]:
        return times.done

    assert done() == (1, ()), "when the first step began is not known"
    times.finish(12.0)
    times.pause(12.5)
    times.pause(13.0)  # one within the other
    times.resume(15.5)
    times.finish(16.0)
    assert done() == (3, (2.0, 1.0)), "an evaluation does not count in a step's time"
    times.discard()
    times.finish(80.0)
    assert done() == (4, ()), "a freeze held the others up as well"
    for moment in range(81, 130):
        times.finish(float(moment))
    assert done() == (53, (1.0,) * 32), "the newest ones"


def test_a_step_is_shared_between_a_ranks_own_time_and_its_waits_for_others() -> None:
    """Medians over what was finished since they were taken last. A wait within a pause does not count, and one that is said again begins anew."""
    times = StepTimes()
    times.wait(1.0)
    times.go_on(5.0)
    times.finish(10.0)
    assert times.take_shares() is None, "when the first step began is not known"
    times.wait(11.0)
    times.go_on(11.5)
    times.wait(12.0)
    times.go_on(14.0)
    times.finish(15.0)
    assert times.take_shares() == (2.5, 2.5) and times.take_shares() is None
    times.wait(16.0)
    times.wait(18.0)  # the device was busy with this rank's own work until here
    times.go_on(19.0)
    times.finish(20.0)
    times.pause(20.0)
    times.wait(21.0)
    times.go_on(29.0)
    times.resume(30.0)
    times.finish(32.0)
    times.finish(42.0)
    assert times.take_shares() == (4.0, 0.0), "of (4, 1), (2, 0), (10, 0)"
    times.go_on(43.0)
    times.discard()
    times.wait(43.0)
    times.go_on(99.0)
    times.finish(100.0)
    assert times.take_shares() is None, "a freeze held it up"
    times.finish(101.0)
    assert times.take_shares() == (1.0, 0.0), "its wait is not the next one's"
    for moment in range(102, 2000):
        times.finish(float(moment))
    assert len(times._shares) == MOST_SHARED


def shares(*moments: float) -> tuple[float, float] | None:
    """Return the shares of steps that end at these moments, without waits."""
    times = StepTimes()
    for moment in moments:
        times.finish(moment)
    return times.take_shares()


def test_the_median_of_an_even_number_of_steps_is_between_the_middle_two() -> None:
    assert shares(0.0, 8.0) == (8.0, 0.0)
    assert shares(0.0, 8.0, 9.0) == (4.5, 0.0)
    assert shares(0.0, 8.0, 9.0, 11.0) == (2.0, 0.0)
    assert shares(0.0, 8.0, 9.0, 11.0, 15.0) == (3.0, 0.0)


def test_a_pause_counts_in_its_own_step_alone_and_leaves_no_time_below_0() -> None:
    times = StepTimes()
    times.pause(0.0)
    times.resume(3.0)
    times.finish(3.0)
    times.finish(5.0)
    assert list(times.done[1]) == [2.0], "a pause before the first step's end is not in the second step"
    times.pause(5.5)
    times.resume(7.0)
    times.finish(6.0)
    assert list(times.done[1]) == [2.0, 0.0], "clocks that were read in another order"


def test_a_wait_is_no_longer_than_its_step_and_counts_once() -> None:
    times = StepTimes()
    times.finish(0.0)
    times.wait(-5.0)
    times.go_on(1.0)
    times.go_on(2.0)
    times.finish(4.0)
    assert times.take_shares() == (0.0, 4.0), "a wait before the step began does not count in it"
    times.wait(4.0)
    times.go_on(5.0)
    times.go_on(6.0)
    times.finish(7.0)
    assert times.take_shares() == (2.0, 1.0), "a wait that is over is over"
