"""What the launcher knows of a start that its journals do not tell: who told the ranks to leave, that nobody was at fault after all, and
that a later start has not gone on where a fault had left off.

Pure: stories and a few facts in, stories and words out.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ttp.checkpoint.format.durable import step_of_directory
from ttp.launch.fault_story import ENDED, NOTICE, Culprit, FaultStory, Line
from ttp.proto.messages import CauseKind
from ttp.wording import counted

UNANNOUNCED = (
    "the ranks ended with exit code 0, and never told their controller that training was over: it took them for dead. No fault is"
    " counted; whether the weights are on disk, only the trainer knows. Decorate the training function with ttp.ttp_to_persist, or call"
    " close() on all ranks at its end"
)
_NO_TIME = "a second signal left no time for it"
CLOSE_ON_ALL = (
    "none: all workers here have succeeded. A rank that ends without close() is taken for dead by those that wait in theirs: call"
    " close() on all ranks, or decorate the training function with ttp.ttp_to_persist"
)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Ranks that the agent ended by SIGKILL at a second signal, and when."""

    ranks: frozenset[int] = frozenset()
    unix_s: float = math.inf


_OUTCOMES = ("write_sent", "written", "published", "finished")


def until_second_signal(lines: Sequence[Line], at_once: AtOnce) -> list[Line]:
    """Return what came before the second signal, and what was saved all the same. All else that follows is its doing: in which order
    the controller noticed that, and how much of it, is chance."""
    return [line for line in lines if line["unix_s"] < at_once.unix_s or line["event"] in _OUTCOMES]


def ended_at_once(start: int, story: FaultStory | None, lines: Sequence[Line], at_once: AtOnce) -> FaultStory:
    """Return the incident of an attempt that a second signal ended: a fault that was there before it, or the notice itself, after which
    it is not known how many steps the ranks had finished. `lines` and `story`: of what came before the signal."""
    if story is not None and story.kind != NOTICE:
        return story
    registered = {line["fields"]["rank"]: line["fields"] for line in lines if line["event"] == "registered"}
    processes = ((rank, registered.get(rank, {})) for rank in sorted(at_once.ranks))
    culprits = tuple(Culprit(rank=r, host=p.get("host", ""), pid=p.get("pid", 0)) for r, p in processes)
    saved = story.saved if story is not None else None
    return FaultStory(
        start=start,
        began_unix_s=story.began_unix_s if story is not None else at_once.unix_s,
        kind=NOTICE,
        culprits=culprits,
        saved=saved,
        not_saved="" if saved is not None else _NO_TIME,
        goes_on_from=saved.path if saved is not None else "",
        steps_lost=story.steps_lost if story is not None and saved is not None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneBack:
    """Steps that are trained again."""

    first_step: int
    """The first that the start has finished."""
    kept_step: int
    """What a fault had left whole, or an earlier job in a checkpoint that is broken."""
    steps: int
    skipped: str = ""
    """The checkpoint of that step, if its ranks found it broken; empty: they have not told so."""

    def text(self, first_step: int) -> str:
        """Say it, for people."""
        why = (
            f"as {self.skipped} was skipped" if self.skipped else f"though a fault had left step {self.kept_step} whole"
        )
        return (
            f"went on with step {first_step}, {why}: {counted(self.steps, 'step')} to train again; what its ranks have logged as they"
            " began may say why"
        )


def gone_back(
    stories: Sequence[FaultStory], start: int, first_step: int, progressed: Collection[int], skipped: str = ""
) -> GoneBack | None:
    """Compare a start's first finished step with what the faults before it had left whole; None: it has gone on from there, or that is
    not known.

    progressed: starts that have finished a step. Behind the newest of those, no fault has changed what there is to go on from.
    skipped: the newest checkpoint that its ranks found broken. Before any start of the job has finished a step, an earlier job had
    come so far; later it may be the same one again.
    """
    since = max(progressed, default=-1)
    known = (_kept(story) for story in reversed(stories) if since <= story.start < start)
    kept = next((step for step in known if step is not None), 0)
    broken = step_of_directory(Path(skipped)) or 0
    if not progressed:
        kept = max(kept, broken)
    if first_step > kept:
        return None
    why = skipped if broken == kept else ""
    return GoneBack(first_step=first_step, kept_step=kept, steps=kept - first_step + 1, skipped=why)


def _kept(story: FaultStory) -> int | None:
    return story.saved.step if story.saved is not None else step_of_directory(Path(story.goes_on_from))


def told_by(story: FaultStory, name: str, at_once: Collection[int] = ()) -> FaultStory:
    """Say of ranks that left on SIGTERM that it was their launcher which sent it, as it got the signal `name` itself; of those that it
    ended `at_once` that a second signal wanted it."""
    if (
        at_once
        and story.kind in (NOTICE, CauseKind.EXITED.value)
        and {culprit.rank for culprit in story.culprits} <= set(at_once)
    ):
        said = f"ttprun got {name}, and ended the ranks at once (SIGKILL) at a second signal"
        why = story.not_saved and _NO_TIME
        ended = (replace(each, cause=said) for each in story.culprits)
        return replace(story, kind=NOTICE, culprits=tuple(ended), not_saved=why)
    if story.kind != NOTICE:
        return story
    notice = signal.SIGTERM.name
    said = f"ttprun got {name}, and told the ranks to leave ({notice})"
    changed = (replace(each, cause=each.cause.replace(notice, said, 1)) for each in story.culprits)
    return replace(story, culprits=tuple(changed))


def left_unannounced(story: FaultStory, pids: Mapping[int, int]) -> bool:
    """Say whether the culprits of a start whose workers here (`pids`) have all succeeded are ranks here that left without a word. Where
    nothing was saved for a restart, it was no fault."""
    ranks = {culprit.rank for culprit in story.culprits}
    return not story.elsewhere and story.kind in ENDED and bool(ranks) and ranks <= set(pids)
