"""Files as jobs leave them, written by the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.json_codec import to_json
from ttp.proto.incident import Culprit, Incident, Saved, incident_fields
from ttp.proto.messages import Phase
from ttp.proto.status import CoverageStatus, JobStatus, PaceStatus, RankStatus

BEGAN = 1_700_000_000.0
"""When the job's first rank came."""
Event = tuple[float, str, Mapping[str, Any]]
"""(seconds after BEGAN, name, fields)."""


def journal(log_dir: Path, attempt: int, *events: Event, place: int = 0) -> Path:
    """Append to a controller's journal."""
    log_dir.mkdir(parents=True, exist_ok=True)
    name = f"standby_{attempt}_{place}.jsonl" if place else f"journal_{attempt}.jsonl"
    with open(log_dir / name, "a") as file:
        for seconds, event, fields in events:
            line = {"unix_s": BEGAN + seconds, "monotonic_s": seconds, "event": event, "fields": fields}
            file.write(json.dumps(line) + "\n")
    return log_dir / name


def inputs(log_dir: Path, attempt: int, address: str, job: str = "run", place: int = 0) -> None:
    """Write the beginning of a journal's inputs."""
    settings = ControllerSettings(f"{job}/{attempt}", 10_000 * attempt + 1 + place, 2, address=address, standby=place)
    name = f"standby_{attempt}_{place}.jsonl" if place else f"journal_{attempt}.jsonl"
    first = {"settings": to_json(settings), "state": "x" * 100_000}
    (log_dir / f"{name}.inputs").write_text(json.dumps(first) + "\n")


def comes(attempt_s: float, ranks: int = 2) -> tuple[Event, ...]:
    """Return what a journal has of ranks that come at once, all of them a second later."""
    came = [
        (attempt_s, "registered", {"rank": rank, "host": f"n{rank}", "pid": 10 + rank, "groups": 1, "state_step": 0})
        for rank in range(ranks)
    ]
    shown = {
        "world_size": ranks,
        "groups": 1,
        "survives": "any 1 of 2 ranks",
        "standbys": [],
        "warnings": [],
        "rows": [],
    }
    return (*came, (attempt_s + 1, "assembled", shown))


def incident(
    end_s: float,
    took_s: float,
    step: int | None,
    lost: int | None = 0,
    *,
    in_place: bool = False,
    written: bool = False,
) -> Event:
    """Return what a journal has of a fault that ended so. `written`: the step is on disk, in place only if asked for."""
    is_saved = step is not None and (written or not in_place)
    saved = Saved(step=step, path=f"/c/iter_{step:07}", bytes=8, ranks=(0,)) if is_saved and step is not None else None
    found = Incident(
        kind="exited", culprits=(Culprit(rank=1, kind="exited", cause="signal SIGKILL"),), saved=saved,
        not_saved="" if saved or in_place else "all ranks are dead", in_place=in_place, steps_lost=lost, took_ms={"total": 1e3 * took_s},
    )  # fmt: skip
    return end_s, "incident", json.loads(json.dumps(incident_fields(found)))


def report(log_dir: Path, *lines: tuple[float, str, Mapping[str, Any]]) -> Path:
    """Append to the launcher's report."""
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / "story.jsonl"
    with open(path, "a") as file:
        for seconds, event, fields in lines:
            file.write(json.dumps({"unix_s": BEGAN + seconds, "event": event, "launch": "l", **fields}) + "\n")
    return path


def fault(attempt: int, began_s: float, step: int | None, lost: int | None = 0, next_: str = "restart 1 of 3") -> Event:
    """Return a `fault` line, written when the attempt's last process had gone."""
    saved = {"step": step, "path": f"/c/iter_{step:07}", "bytes": 8, "ranks": [0]} if step is not None else None
    fields = {
        "start": attempt, "began_unix_s": BEGAN + began_s, "kind": "exited", "culprits": [{"rank": 1, "cause": "signal SIGKILL, out of memory"}],
        "saved": saved, "not_saved": "" if saved else "all ranks are dead", "steps_lost": lost, "took_ms": {"total": 500.0}, "next": next_,
        "elsewhere": "",
    }  # fmt: skip
    return began_s + 0.6, "fault", fields


def start(attempt: int, seconds: float) -> Event:
    return seconds, "start", {"start": attempt, "world_size": 2}


def end(seconds: float, step: int, saved: int | None, **more: Any) -> Event:
    fields = {
        "result": "succeeded",
        "why": "",
        "last": {"step": step, "saved_step": saved},
        "steps_lost": 0,
        "unknown_losses": 0,
    }
    return seconds, "end", {**fields, **more}


def rank_status(rank: int, **given: Any) -> RankStatus:
    fields: dict[str, Any] = {"host": f"n{rank // 8}", "pid": 100 + rank, "attached": True, "phase": Phase.COMPUTE, "step": 8, "dead": False,
                              "cause": None, "silent_s": 0.1, "step_s": 0.5}  # fmt: skip
    return RankStatus(rank, **(fields | given))


def job_status(ranks: Sequence[RankStatus], **given: Any) -> JobStatus:
    fields: dict[str, Any] = {
        "job_id": "run/0", "term": 1, "world_size": len(ranks), "stage": "running", "survives": "any 1 of 2 ranks", "ranks": tuple(ranks),
        "published": None, "pid": 7, "address": "n0:5/1", "standbys": ("n1:6/2",), "heartbeat_s": 1.0, "lease_s": 3.0,
        "pace": PaceStatus(7, 8, 0.5, 0.6, 0.2, 10.0), "coverage": CoverageStatus(2, 2),
    }  # fmt: skip
    return JobStatus(**(fields | given))
