"""What must be true where nothing more happens: I9, I11, and that false alarms cost nothing."""

from __future__ import annotations

from tests.model.rank import Rank
from tests.model.situation import Situation
from tests.model.world import World
from ttp.processor.core.state import RankMode


def judge(world: World, situation: Situation) -> tuple[str, str]:
    """Return what came of the job, and what is wrong with that (empty: nothing)."""
    shape = world.shape
    ranks = [world.rank(situation, rank) for rank in range(shape.world_size)]
    controllers = [world.controller(situation, place) for place in range(len(situation.controllers))]
    facts = [fact for it in controllers for fact in it.facts]
    alone = all(it.gone or it.ever_stopped for it in controllers)
    left = [rank for rank in ranks if rank.running]
    if any(rank.hung for rank in left) and all(rank.proc.standing is RankMode.TRAINING for rank in left):
        return "hanging, for the pace to find", ""
    if left and not alone:
        numbers = [rank.number for rank in left]
        return "hanging", f"I11: ranks {numbers} do not end: {[(r.main, r.proc.standing.value) for r in left]}"
    if all(rank.ended == "exit code 0" and rank.gate.state[0] == shape.steps for rank in ranks):
        return "trained on, in place" if situation.opened else "trained on", ""
    if any(fact.event == "finished" for fact in facts):
        unfinished = [rank.number for rank in ranks if rank.came[1] < shape.steps]
        trained = "trained on, in place" if situation.opened else "trained on"
        return trained, f"I11: ranks {unfinished} were released before they had finished" if unfinished else ""
    published = [fact for fact in facts if fact.event == "published"]
    if published:
        logged = next(it.facts for it in controllers if published[0] in it.facts)
        newest = max((fact.step for fact in logged if fact.event == "frozen"), default=0)
        if newest > published[0].step:
            return "published", f"I6: step {published[0].step} was published although a rank reported record {newest}"
        return _of_published(world, situation, published[0].path, published[0].step)
    if world.disk(situation).published and alone:
        return "published, and no controller logged it", ""
    if alone:
        return "without a controller", ""
    refused = [fact.reason for fact in facts if fact.event == "refused"]
    if not refused:
        return "no outcome", "I9: neither published nor refused nor finished"
    return "refused", _of_refusal(world, situation, ranks, refused[-1])


def _of_published(world: World, situation: Situation, path: str, step: int) -> tuple[str, str]:
    root = path.rsplit("/", 1)[0]
    disk = world.disk(situation)
    if (root, step) not in disk.published or dict(disk.tracker).get(root, 0) < step:
        return "published", f"I4: {path} was said to be published; disk {disk.published}, {disk.tracker}"
    return f"published step {step}", ""


def _of_refusal(world: World, situation: Situation, ranks: list[Rank], reason: str) -> str:
    """I9: a refusal needs a shard of which no copy could have been written."""
    sound = {rank.number for rank in ranks if _is_sound(rank, situation.thawed_up_to)}
    if "nothing to save" in reason:
        return "" if situation.committed <= 1 else f"I9: refused for having nothing after step {situation.committed}"
    if "directories could be written" in reason:
        full = world.disk(situation).full
        return "" if full >= set(world.shape.roots) else f"I9: refused for the disks, but only {sorted(full)} are full"
    covered = all(sound.intersection(holders) for holders in world.shape.holders)
    return f"I9: covered by sound ranks {sorted(sound)}, yet refused: {reason}" if covered else ""


def _is_sound(rank: Rank, thawed_up_to: int) -> bool:
    """No fault affected it: it exited on order. Or it would have, had it not been ended to be replaced. A replacement is a holder once all
    gates have opened."""
    if rank.spared:
        return True
    exited = rank.ended in ("exit code 75", "exit code 0", "exit code 1")
    return exited and not rank.unsound and rank.began_in <= max(0, thawed_up_to)
