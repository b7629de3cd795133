"""The invariants, checked on a finished simulated job."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Collection
from math import inf
from pathlib import Path

from tests.simulation.contents import wrong_parts, wrong_record, wrong_step
from tests.simulation.controllers import Controller
from tests.simulation.disk import OLDER_STEP, final_name, older_checkpoint
from tests.simulation.faults import OF_STREAMS
from tests.simulation.incident_checks import misreported
from tests.simulation.job import Job, content_of
from tests.simulation.piece_checks import pieces_found
from tests.simulation.scenario import Scenario
from tests.simulation.silence_checks import wrongly_dead_or_alive
from tests.simulation.time_checks import late
from tests.simulation.truth import LATE_CLOSING_S, covers, events, of_last_fault, sound
from ttp.errors import TTPError

LONGEST_RUN_S = 45.0
CALM_START_S = 0.5
"""Undisturbed ranks have come together by then: they start within 0.1 s."""


def run_and_check(scenario: Scenario) -> list[str]:
    """Run a scenario to its end and return every violated invariant."""
    job = scenario.job
    ended = job.run(LONGEST_RUN_S)
    found = list(job.violations)
    if not ended and _hangs_unseen(job):
        return found
    if not ended and not unprotected(job):  # a rank that hangs in a collective is then ended by its launcher
        running = [rank.rank for rank in job.ranks if rank.alive]
        found.append(f"I11: not over after {job.now:.1f} s; controllers {_stages(job)}, alive {running}")
    found += [] if ended else _saves_for_ever(job)
    found += late(job)
    found += wrongly_dead_or_alive(job)
    found += _published_content(job) if job.own is None else pieces_found(job)
    found += job.comparing.violations()
    found += _unprovoked(job)
    found += _not_begun(job)
    found += _said(job)
    found += _untold(job)
    if job.own is None:
        found += _older_and_newest(job)
    found += _lost_steps(job)
    found += misreported(job)
    found += _vetoed(job)
    found += _outcome(scenario)
    return found


def _hangs_unseen(job: Job) -> bool:
    """True where a rank hangs in a step that follows a recovery in place, and hangs are looked for only later than the job is watched."""
    regrouped = any(rank.generation > 0 for rank in job.ranks)
    return regrouped and job.times.hang_floor_s > LONGEST_RUN_S and any(r.stuck for r in job.ranks)


def _saves_for_ever(job: Job) -> list[str]:
    """I11: a save without a controller ends by itself, whoever hangs in it."""
    saving = job.saving()
    return [f"I11: ranks {saving} still save a step without a controller"] if saving else []


def _older_and_newest(job: Job) -> list[str]:
    """I4, I9, I10: the older checkpoint is untouched, trackers name the newest, and a restart loads it."""
    found, disk = [], job.disk
    found += [f"I4: {text}" for text in disk.tracker.went_back]
    for root in job.roots:
        older = disk.directories.get((root, final_name(OLDER_STEP)))
        if older is None or older != older_checkpoint():
            found.append(f"I9: the older checkpoint in {root} was touched")
        named, there = disk.tracker[root], {step for where, step in (*disk.published, *disk.before) if where == root}
        if named not in there:
            found.append(f"I4: the tracker of {root} names step {named}, there are {sorted(there)}")
    newest = max([OLDER_STEP, *(step for _, step in disk.published)])
    if disk.recovered() != newest:
        found.append(f"I10: a restart loads step {disk.recovered()}, published was {newest}")
    return found


def violations(scenario: Scenario) -> list[str]:
    """Run a scenario to its end; a machine that raises violates the protocol as well."""
    try:
        return run_and_check(scenario)
    except (AssertionError, LookupError, ValueError, TTPError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"raised: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return [raised, *scenario.job.violations]


def _stages(job: Job) -> list[str]:
    return [("dead" if c.dead else "over" if c.over else c.state.stage.value) for c in job.controllers]


def _published_content(job: Job) -> list[str]:
    """I1, I2, I3, I4, I5, I6, I8: what can be seen on disk."""
    found = []
    for (root, step), committed in zip(job.disk.published, job.committed_when_published, strict=True):
        name = f"iter_{step:07d}"
        directory = job.disk.directories[root, name]
        manifest = directory.manifest
        if manifest is None or manifest.step != step:
            found.append(f"I1: {root}/{name} has no manifest of its step")
            continue
        if manifest.host_state != job.training.host_state(step):
            found.append(f"I12: {root}/{name} resumes with the host state {manifest.host_state}, not that of its step")
        found += wrong_record(job, f"{root}/{name}", step, manifest)
        files = [directory.files.get(file) for file in manifest.files]
        if any(file is None or not file.durable for file in files):
            found.append(f"I1: {root}/{name} lists a file that is missing or not durable")
        found += wrong_parts(job, step, [file for file in files if file is not None])
        found += wrong_step(job, f"{root}/{name}", step, committed)
        durable = {file for file, content in directory.files.items() if content.durable}
        if not durable >= set(manifest.files) or job.published_as[root, name] != content_of(directory):
            found.append(f"I8: {root}/{name} changed after it was published")
    if len(set(job.disk.published)) != len(job.disk.published):
        found.append(f"I4: a step was published twice: {job.disk.published}")
    for fields in events(job, "published"):
        root = str(fields["path"]).rsplit("/", 1)[0]
        step = int(str(fields["step"]))
        hint = job.disk.tracker[root] >= step or root in job.disk.spoiled()
        if (root, step) not in job.disk.published or not hint:
            found.append(
                f"I4: {fields['path']} was said to be published; disk {job.disk.published}, {job.disk.tracker}"
            )
    return found


def _said(job: Job) -> list[str]:
    """I2: a controller announces it once in a fault, and after a fault the job is over."""
    found = []
    for controller in job.controllers:
        said = 0
        for _, line in controller.journal:
            said = 0 if line.event == "regrouped" else said + (line.event == "published")
            if said > 1:
                found.append(f"I2: controller c{controller.place} published several times in one fault: {line.fields}")
    return found


def _unprovoked(job: Job) -> list[str]:
    """I7: no rank is suspected, and nothing taken for a hang, before anything has happened."""
    alarms = [(at, line) for at, line in job.journal if line.event in ("suspect", "hung") and at < job.calm_until]
    return [f"I7: {line.event} at {at:.3f} s although nothing had happened: {line.fields}" for at, line in alarms]


def _not_begun(job: Job) -> list[str]:
    """I11: a job in which nothing went wrong while its ranks came together is assembled."""
    if job.calm_until <= CALM_START_S or events(job, "assembled"):
        return []
    return [f"I11: nothing had happened in the first {CALM_START_S} s, and the job did not assemble: {_stages(job)}"]


def _untold(job: Job) -> list[str]:
    """I11: deaths are reported to whichever controller is active, so the agents know the standbys."""
    unknown = {launcher.host: launcher.unknown_standbys() for launcher in job.launchers.values()}
    return [f"I11: the agent of {host} never learned of {names}" for host, names in unknown.items() if names]


def _outcome(scenario: Scenario) -> list[str]:
    """I9, I11: published, refused with a true reason, or trained to the end; false alarms cost nothing."""
    job = scenario.job
    saved_alone = any(rank.boundary.saved for rank in job.ranks)
    if not (saved_alone if job.must_save == "alone" else job.disk.published or not job.must_save):
        return [f"I14: no step was saved, expected: by {job.must_save}. {job.disk.published}, {job.notes[-3:]}"]
    if saved_alone:
        return []
    published, refused = of_last_fault(job, "published"), of_last_fault(job, "refused")
    finished, exits = events(job, "finished"), events(job, "exit_sent")
    if finished:
        trained = (*job.ranks, *(former for former in job.in_place.former if former.released))
        ended = {r.rank for r in trained if r.gate.state_step == job.training.steps}
        return [f"I11: rank {r.rank} had not finished" for r in job.ranks if r.rank not in ended]
    through = [rank for rank in job.ranks if rank.gate.state_step == job.training.steps]
    if through == job.ranks and all(rank.released for rank in job.ranks):
        return []  # without the word of a controller that was away for too long
    if unprotected(job):
        return []
    if job.strikes and any(rank.boundary.saving and rank.ended == "exit code 1" for rank in job.ranks):
        return []  # they were saving a step alone and could not, as another controller came up
    if _start_failed(job):
        return []
    excused = (
        job.excused
        or ((published or refused) and _comes_and_goes(job))
        or (published and (_stood_still_itself(job) or _left_unled_at_the_end(job) or _back_at_the_end_of_a_lease(job)))
    )
    if scenario.harmless and not excused:
        return [f"I7: a false alarm cost the job: {scenario.faults}, {job.controller.over}"]
    if published:
        return []
    if not events(job, "assembled"):
        return [] if exits or not sound(job) else ["I11: the start failed without a word"]
    if _leads_no_rank(job) and all(rank.rank in job.killed or rank.stopped_for_good for rank in job.ranks):
        return []  # no rank remains that could look for another controller, or receive anything from a new one
    if not refused and not covers(job, sound(job)) and any(rank.ended == "exit code 1" for rank in job.ranks):
        return []  # the ranks that remain cannot cover, and gave the wait for a controller up
    returned = {fields["rank"] for fields in events(job, "rank_finished")}
    unled = {r.rank for r in through if r.rank in job.killed and r.was_stopped} if _leads_no_rank(job) else set[int]()
    if not refused and through == job.ranks and all(r.released or r.rank in returned | unled for r in job.ranks):
        return []  # some of them were killed on their way out, or cut off where the only controller had died
    if not refused and (_settled_by_the_replaced(job) or _published_unled(job)):
        return []
    if not refused:
        return [f"I9: neither published nor refused nor finished: {job.controller.over}"]
    return false_refusal(job)


def _comes_and_goes(job: Job) -> bool:
    """True when one absence of a controller and another trouble came together, close before the alarm: a second absence, the death of
    another controller while it lasted for the orphan timeout or in the lease before, or a stream of a rank that had just failed. One that sends for a moment keeps a rank from the standby for a lease more, which
    is longer than the standby waits for it. That costs a dump; and the steps since the newest checkpoint, where the others do
    not cover."""
    alarm_s = next(at for at, line in job.journal if line.event in ("decided", "refused"))
    since_s = alarm_s - job.times.lease_s - job.times.orphan_timeout_s
    away = [
        (began, ended) for c in job.controllers for began, ended in c.absences if began <= alarm_s and ended >= since_s
    ]
    long = [began for began, ended in away if ended - began >= job.times.orphan_timeout_s]
    if any(min(since_s, began - job.times.lease_s) <= c.killed_s <= alarm_s for c in job.controllers for began in long):
        return True
    return _away_among_troubles(job, since_s, alarm_s, OF_STREAMS)


def _back_at_the_end_of_a_lease(job: Job) -> bool:
    """True when the first rank that a controller took for dead was silent until within the network's time after that controller had been away for nearly
    a lease: what the rank had sent meanwhile was still under way, and its lease ended just then. That costs a restart, and no step."""
    lease_s, slowest_s = job.times.lease_s, job.slowest_s
    for controller in job.controllers:
        deaths = [(at, line.fields["kind"]) for at, line in controller.journal if line.event == "death_seen"]
        back = [
            ended_s
            for began_s, ended_s in controller.absences
            if lease_s - job.times.heartbeat_s - slowest_s <= ended_s - began_s < lease_s
        ]
        if deaths and deaths[0][1] == "silent" and any(at <= deaths[0][0] <= at + slowest_s for at in back):
            return True
    return False


def _stood_still_itself(job: Job) -> bool:
    """True when a rank was kept from looking for another controller for a moment, while it had none or in the lease before the first
    rank came to a new one: it gives the lost one as much more time, and comes that much later than the others, who cover
    without it. That costs a restart, and no step."""
    brief = ("brief stop", "interpreter held briefly")
    takeovers = [at for at, line in job.journal if line.event == "takeover_began"]
    return any(
        strike.kind in brief
        and (strike.where == "leaderless" or any(at - job.times.lease_s <= strike.at_s <= at for at in takeovers))
        for strike in job.strikes
    )


def _left_unled_at_the_end(job: Job) -> bool:
    """True when the last step was saved, and a rank that had finished it left while a controller was away for longer than ranks wait for one:
    its exit breaks the last collective of a rank that has not returned from it. That costs a restart, and no step."""
    last, wait_s = job.training.steps, job.times.controller_lost_s
    left = [rank.ended_s for rank in job.ranks if rank.released and rank.gate.state_step == last]
    away = [absence for controller in job.controllers for absence in controller.absences]
    unled = any(began_s + wait_s <= left_s <= ended_s for began_s, ended_s in away for left_s in left)
    return unled and any(fields["step"] == last for fields in events(job, "published"))


def _unheard(job: Job, verdict_s: float) -> frozenset[int]:
    """Return the ranks of which what they had said last was lost within a lease before a verdict: they were silent for longer
    than it took to notice, and may have come back too late. So may those whose streams broke twice within it."""
    since_s = verdict_s - job.times.lease_s
    recent = [s for s in job.strikes if since_s <= s.at_s <= verdict_s]
    broken = Counter(s.rank for s in recent if s.kind in OF_STREAMS)
    return frozenset(s.rank for s in recent if s.kind == "message loss" or broken[s.rank] > 1)


def _kept_apart(job: Job, verdict_s: float) -> bool:
    """True when a controller was away, within two leases before its verdict or before it took over, while ranks had to come to it or to another:
    streams had failed, a node was cut off, or another controller was lost or away too. Each may have known a part of the ranks only, which does
    not cover. A single absence, or a clock that leaps ahead, does not count: then all ranks are there again. But a controller that
    receives messages of all ranks, and whose own do not arrive, takes those for stuck that have not answered in time."""
    mute = {strike.at_s for strike in job.strikes if strike.kind == "controller's messages do not arrive"}
    long_s = min(job.times.freeze_timeout_s, job.times.progress_timeout_s)
    for controller in job.controllers:  # by its own clock, which may leap meanwhile
        for began, ended in controller.absences:
            long = ended - began + controller.ahead_s >= long_s
            if began in mute and long and began <= verdict_s <= ended + long_s:
                return True
    routes = ("duplication", "rank receives nothing", "rank's messages do not arrive")
    kinds = (*OF_STREAMS, *routes, "node cut off", "controller kill", "rank and controller kill")
    takeovers = [at for at, line in job.journal if line.event == "takeover_began" and at <= verdict_s]
    return _away_among_troubles(job, max(takeovers, default=verdict_s) - 2 * job.times.lease_s, verdict_s, kinds)


def _away_among_troubles(job: Job, since_s: float, until_s: float, kinds: Collection[str]) -> bool:
    """True when between these moments a controller was away twice, or once while something of these kinds had just acted. One whose clock is behind for a
    lease sends nothing by itself meanwhile, and its ranks leave it: it is away too."""
    lease_s = job.times.lease_s
    absences = [
        (began_s, ended_s)
        for controller in job.controllers
        for began_s, ended_s in (
            *controller.absences,
            *(leap for leap in controller.leaps if leap[1] - leap[0] >= lease_s),
        )
        if began_s <= until_s and ended_s >= since_s
    ]
    just_then = any(
        began_s - lease_s <= strike.at_s <= ended_s
        for began_s, ended_s in absences
        for strike in job.strikes
        if strike.kind in kinds
    )
    return len(absences) > 1 or just_then


def _leads_no_rank(job: Job) -> bool:
    """True when the last controller that ranks came to is dead, or had not taken over yet."""
    last = job.controller
    return last.dead or (last.place > 0 and not any(line.event == "took_over" for _, line in last.journal))


def _published_unled(job: Job) -> bool:
    """True when the last controller that ranks came to died before its publisher could answer, or ended with its step saved by processes in whose places
    others are; and the step that it had decided is on disk."""
    decided = [fields["step"] for fields in events(job, "decided")]
    settled = _leads_no_rank(job) or " is saved in " in job.controller.over
    return settled and any(step == decided[-1] for _, step in job.disk.published if decided)


def _settled_by_the_replaced(job: Job) -> bool:
    """True when of the job's own processes none remains that has any state, and a controller has found that all are dead, or has ended with those in
    whose places others were started: whatever becomes of what they have."""
    empty = all(rank.rank in job.killed or rank.state.vacant for rank in job.ranks)
    return empty and any("all ranks are dead" in c.over or (c.led_none and bool(c.over)) for c in job.controllers)


def _start_failed(job: Job) -> bool:
    """True when the controller died, or went away for a lease, while it welcomed the ranks: those that know the standbys
    wait for the others in vain. No step can be finished before all are welcomed; a controller that has taken over meanwhile does not
    know the others."""
    welcomed = [rank.started_s for rank in (*job.ranks, *job.in_place.former) if not rank.began_in]
    return max(welcomed) > min(welcomed) + job.times.lease_s or max(welcomed) > _assembled_s(job) + job.times.lease_s


def _assembled_s(job: Job) -> float:
    return min((at for at, line in job.journal if line.event == "assembled"), default=0.0)


def unprotected(job: Job) -> bool:
    """True when the last controller that ranks could come to was killed, or away for about as long as they wait for one:
    what they cannot do alone, they give up. One that was started as they did so is too late, and one that has ended while an earlier one led them on is no
    other one."""
    world_size = job.training.layout.world_size
    early_s = min((rank.ended_s for rank in job.ranks if rank.gave_up), default=inf) - job.times.lease_s
    known = [
        c
        for c in job.controllers
        if (c.place < world_size or c.place > job.first_standbys) and c.began_s < early_s and not _ended_apart(job, c)
    ]
    came = max((c.place for c in known if c.ranks_came), default=0)
    return all(c.dead or c.away_s > job.times.controller_lost_s / 2 for c in known if c.place >= came)


def _ended_apart(job: Job, ended: Controller) -> bool:
    """True when this controller has ended, and an earlier one that never did has led on, or only processes on lost nodes were with it."""
    earlier = [c for c in job.controllers if c.place < ended.place and not c.over and c.journal]
    return bool(ended.over) and (ended.led_none or any(c.journal[-1][0] > ended.over_s for c in earlier))


def false_refusal(job: Job) -> list[str]:
    """I9: where ranks that nothing happened to cover a step, on directories that serve them, it is not refused.

    The first refusal is judged, since ranks leave after it; that of a controller that is apart from the others only when there is no other.
    """
    refusals = [snapshot for snapshot in job.snapshots if snapshot.verdict == "refused"]
    refused = next((snapshot for snapshot in refusals if not snapshot.apart), refusals[0])
    step = refused.newest(job, sound(job, refused.at_s) - _unheard(job, refused.at_s))
    if not step or job.comparing.disputed or _kept_apart(job, refused.at_s) or _has_published(job, step, refused.at_s):
        return []
    return [f"I9: step {step} was covered by ranks that nothing happened to, yet refused: {events(job, 'refused')[0]}"]


def _has_published(job: Job, step: int, refused_s: float) -> bool:
    """True when a controller that had died by then had ordered the step to be published, and it is on disk: nothing is lost by the refusal of one that did
    not know it."""
    ordered = [
        fields["step"]
        for controller in job.controllers
        if controller.killed_s <= refused_s
        for fields in (line.fields for _, line in controller.journal if line.event == "publish_sent")
    ]
    return any(published >= step and published in ordered for _, published in job.disk.published)


def _lost_steps(job: Job) -> list[str]:
    """I6: a dump has the newest step that ranks cover that nothing happened to, whoever decided it."""
    decided = [snapshot for snapshot in job.snapshots if snapshot.verdict == "decided"]
    if not decided or not of_last_fault(job, "published"):
        return []
    last = decided[-1]
    newest = last.newest(job, sound(job) & sound(job, last.at_s) - _unheard(job, last.at_s))
    published = max(int(str(fields["step"])) for fields in of_last_fault(job, "published"))
    if published >= newest or _kept_apart(job, last.at_s):
        return []
    return [f"I6: step {published} was published, step {newest} was covered by ranks that nothing happened to"]


def _vetoed(job: Job) -> list[str]:
    """I9: one rank's disk vetoes no directory: a step is published in the first one of the list that serves ranks that cover it
    and that nothing happened to; of one whose update ended just before the decision the controller knows nothing yet. A directory with a file that
    ended short unnoticed serves no rank, as for a refusal. Ranks that were kept apart while they wrote, or that were not welcomed at first, may have
    been lost to a directory: that costs no step."""
    said = next((at for at, line in job.journal if line.event == "published"), inf)
    decided = [snapshot for snapshot in job.snapshots if snapshot.verdict == "decided" and snapshot.at_s <= said]
    if said == inf or not decided or job.own is not None or job.comparing.disputed:
        return []
    if _kept_apart(job, decided[-1].at_s) or _kept_apart(job, said) or _start_failed(job):
        return []
    first = min(job.roots.index(str(fields["path"]).rsplit("/", 1)[0]) for fields in events(job, "published"))
    step = int(str(events(job, "published")[0]["step"]))
    late = {rank.rank for rank in job.ranks if rank.closed_late_s >= decided[-1].at_s - LATE_CLOSING_S}
    reaching = decided[-1].reaching(step, sound(job, said) - late)
    for name in job.roots[:first]:
        served = {rank for rank in reaching if job.disk.serves(rank, name)}
        if covers(job, served) and (name, step) not in job.disk.published:
            return [f"I9: {name} serves ranks {sorted(served)}, who cover step {step}, yet it is not published there"]
    return []
