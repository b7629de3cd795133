"""The invariants on disks of each host's own, checked on a finished simulated job."""

from __future__ import annotations

from tests.simulation.contents import wrong_parts, wrong_record, wrong_step
from tests.simulation.disk import OLDER_STEP, final_name
from tests.simulation.job import Job
from tests.simulation.pieces import Key, OwnDisks, content_of_piece, host_of, name_of, older_piece


def pieces_found(job: Job) -> list[str]:
    """I1 to I6, I8 to I10, I12: what can be seen on all disks together, those that were lost included."""
    assert isinstance(job.disk, OwnDisks)
    disk, found = job.disk, []
    found += [f"I8: {text}" for text in disk.went_back]
    found += _single_pieces(job, disk)
    for key, missing in disk.lacking(disk.hosts).items():
        if not missing and key.step > OLDER_STEP:
            files = {
                name: file
                for _, its, piece in disk.pieces(disk.hosts)
                if its == key
                for name, file in piece.files.items()
            }
            found += wrong_parts(job, key.step, files.values())
    found += _trackers(job, disk)
    found += _older_and_newest(job, disk)
    return found


def _single_pieces(job: Job, disk: OwnDisks) -> list[str]:
    """Each is there as it was when it got its name, with its own host's files, and is of the right step."""
    found = []
    there = {(root, key): piece for root, key, piece in disk.pieces(disk.hosts)}
    for placed in disk.placed:
        root, key = placed.root, placed.key
        piece = there.get((root, key))
        if piece is None or content_of_piece(piece) != placed.content:
            found.append(f"I8: the piece {key} in {root} changed after it was published")
            continue
        assert piece.manifest is not None
        if any(not file.durable for file in piece.files.values()):
            found.append(f"I1: the piece {key} in {root} has a file that is not durable")
        if piece.manifest.host_state != job.training.host_state(key.step):
            found.append(f"I12: the piece {key} in {root} resumes with the host state {piece.manifest.host_state}")
        found += wrong_record(job, f"{root}: {key}", key.step, piece.manifest)
        found += wrong_step(job, f"{name_of(root)}/{final_name(key.step)}", key.step, placed.committed)
    names = [(placed.root, placed.key) for placed in disk.placed]
    return found if len(set(names)) == len(names) else [*found, f"I4: a piece was published twice: {names}"]


def _trackers(job: Job, disk: OwnDisks) -> list[str]:
    """I4: each names a step of which its directory has a piece."""
    found = [f"I4: {text}" for text in disk.tracker.went_back]
    for root, named in disk.tracker.items():
        steps = {key.step for where, key, _ in disk.pieces((host_of(root),)) if where == root}
        if named not in steps:
            found.append(f"I4: the tracker of {root} names step {named}, there are {sorted(steps)}")
    return found


def _older_and_newest(job: Job, disk: OwnDisks) -> list[str]:
    """I9, I10: the older checkpoint is untouched; what was said to be published is loaded, unless a disk was lost with it."""
    found = []
    for root in sorted(host + name for host in disk.hosts for name in disk.names):
        if disk.directories.get((root, final_name(OLDER_STEP))) != older_piece(root, disk.hosts):
            found.append(f"I9: the older checkpoint in {root} was touched")
    loaded, newest = disk.recovered(), _newest_kept(job, disk)
    if loaded < newest:
        found.append(
            f"I10: a restart loads step {loaded}, but step {newest} was published and no disk with it was lost"
        )
    return found


def _newest_kept(job: Job, disk: OwnDisks) -> int:
    """Return the newest step that was said to be published and whose disks are all left."""
    older = Key(OLDER_STEP, 0, ""), frozenset(disk.hosts)
    return max((key.step for key, hosts in (*job.said, older) if not hosts & disk.lost), default=OLDER_STEP - 1)
