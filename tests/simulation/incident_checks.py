"""I15: each fault that a controller ends is reported once, and as it was."""

from __future__ import annotations

from tests.simulation.controllers import Controller
from tests.simulation.job import Job
from tests.simulation.pieces import OwnDisks
from ttp.controller.core.facts.state import Stage
from ttp.proto.incident import Incident, read_incident
from ttp.proto.messages import CauseKind

_SIGNS = ("suspect", "death_seen", "fault_reported", "hung", "takeover_began")


def misreported(job: Job) -> list[str]:
    """Return what is wrong in the incidents of a finished job, by what was done to it and by what is on its disks."""
    return [f"I15: c{each.place} {text}" for each in job.controllers for text in _of_controller(job, each)]


def _of_controller(job: Job, controller: Controller) -> list[str]:
    events = [line.event for _, line in controller.journal]
    incidents = [(at, read_incident(line.fields)) for at, line in controller.journal if line.event == "incident"]
    last = events[_since_thaw(events) :]
    ends = ("exit_sent", "refused", "published") if controller.state.stage is Stage.OVER else ("exit_sent", "refused")
    end = next((place for place, event in enumerate(last) if event in ends), None)
    due = events.count("regrouped")
    due += 1 if end is not None and any(event in _SIGNS for event in last[:end]) else 0
    if len(incidents) != due:
        return [f"has reported {len(incidents)} incidents, expected {due}: {events[-4:]}"]
    befores = [0.0, *(at for at, _ in incidents)]
    return [
        text
        for since, (at, incident) in zip(befores, incidents, strict=False)
        for text in _wrong(job, controller, incident, since, at)
    ]


def _since_thaw(events: list[str]) -> int:
    return max((place + 1 for place, event in enumerate(events) if event in ("thawed", "regrouped")), default=0)


def _wrong(job: Job, controller: Controller, incident: Incident, since_s: float, at_s: float) -> list[str]:
    found = _wrong_outcome(job, controller, incident, since_s, at_s) + _wrong_restart(job, controller, incident, at_s)
    for culprit in incident.culprits:
        rank = job.in_place.process_of(culprit.rank, culprit.pid)
        if culprit.kind == CauseKind.EXITED.value and not incident.suspected and rank.ended_s > at_s + job.slowest_s:
            found.append(f"reports an exit of rank {culprit.rank}, which runs at {at_s:.3f} s")
    places = [rank for place in incident.survivors for rank in place.ranks]
    if named := {culprit.rank for culprit in incident.culprits} & set(places) or len(places) != len(set(places)):
        found.append(f"reports ranks as survivors twice, or culprits: {named}")
    return found


def _wrong_outcome(job: Job, controller: Controller, incident: Incident, since_s: float, at_s: float) -> list[str]:
    """What it says is saved is on disk, by those that wrote it, and the steps that it says are lost were finished."""
    published = [line.fields for at, line in controller.journal if line.event == "published" and since_s <= at <= at_s]
    saved = incident.saved
    silent = any(
        line.event == "death_seen" and line.fields["kind"] == "silent" and since_s <= at <= at_s
        for at, line in controller.journal
    )
    first = job.times.publish_first or silent
    if incident.in_place and (
        incident.steps_lost != 0 or (saved is not None and not first) or (saved is None and job.times.publish_first)
    ):
        return [f"reports {incident} as ended in place"]
    if incident.in_place and saved is None:
        return []
    if saved is None:
        return [] if incident.not_saved and not published else [f"reports nothing saved: {incident.not_saved!r}"]
    if not published or (saved.step, saved.path) != (published[-1]["step"], published[-1]["path"]):
        return [f"reports {saved}, published was {published}"]
    found = []
    if not isinstance(job.disk, OwnDisks):
        root, _, name = saved.path.rpartition("/")
        directory = job.disk.directories.get((root, name))
        manifest = directory.manifest if directory is not None else None
        if directory is None or manifest is None or (root, saved.step) not in job.disk.published:
            return [f"reports {saved}, which is not on disk"]
        if manifest.term == controller.term:  # else another controller's checkpoint was there first
            nbytes = sum(directory.files[file].nbytes for file in manifest.files)
            if saved.bytes != nbytes:
                found.append(f"reports {saved.bytes} bytes, on disk are {nbytes}")
    if incident.steps_lost is not None and saved.step + incident.steps_lost > job.committed():
        found.append(
            f"reports {incident.steps_lost} steps lost after {saved.step}: {job.committed()} was the last committed"
        )
    return found


def _wrong_restart(job: Job, controller: Controller, incident: Incident, at_s: float) -> list[str]:
    """What it says that the job goes on from is on disk, and the newest of what it has published itself and of what ranks knew whose reports
    have come to it."""
    if incident.in_place:
        return []
    said, root = incident.goes_on_from, incident.goes_on_from.rpartition("/")[0]
    known = [path for at, path in controller.known_checkpoints if at <= at_s]
    known += [str(line.fields["path"]) for at, line in controller.journal if line.event == "published" and at <= at_s]
    newest = max(known, key=_step_of, default="")
    if _step_of(said) < _step_of(newest):
        return [f"reports that the job goes on from {said!r}, and it knew of {newest!r}"]
    if said and job.own is None and (root, _step_of(said)) not in {*job.disk.published, *job.disk.before}:
        return [f"reports that the job goes on from {said!r}, which is not on disk"]
    return []


def _step_of(path: str) -> int:
    """Return the step of a checkpoint's path; -1: there is no path."""
    return int(path.rpartition("_")[2]) if path else -1
