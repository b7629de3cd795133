"""Which older steps go where nodes have directories of their own: the folders of all nodes, seen from one place.

Owns the proof that a step is whole: one write of it has every file that its parts list, checksums compared, in some of the folders, and
their tables of contents hold every tensor once, which is what an attempt of the job would find. A step that is not whole here may be whole
with a node that is not seen, and is kept unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ttp.checkpoint.find import step_of
from ttp.checkpoint.format import checksum, dcp
from ttp.checkpoint.format.file_index import parse_tables, read_tables
from ttp.checkpoint.format.signature import VerifyKey
from ttp.checkpoint.node_local.parts import NodePart, list_parts, read_parts, write_of
from ttp.checkpoint.passed_over import MEANING, is_in
from ttp.checkpoint.prune import Plan, Step, choose
from ttp.checkpoint.verify import check_complete
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import FileEntry

Write = tuple[int, int, str, str]
"""What `write_of` returns."""


def plan_prune(
    folders: Sequence[Path],
    keep: int,
    partial: bool,
    advance: Callable[[int], None],
    key: VerifyKey | None = None,
    passed_over: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """Choose by reading; `advance` is called with bytes read. partial: steps that are not whole here go as well, where they are older
    than all that stay. key: who must have signed what counts. passed_over (inode by path): left alone, and not counted.

    Raises CheckpointError where no step is whole, or where a folder has a checkpoint that is not a part.
    """
    published = list_parts(folders)
    others = [path for path in published if is_in(passed_over, path)]
    broken: list[Step] = []
    writes: dict[int, dict[Write, list[NodePart]]] = {}
    for part in read_parts(
        [path for path in published if path not in others],
        lambda path, error: broken.append(Step(0, (path,), error=str(error))),
        key,
    ):
        if not part.manifest.hosts:
            raise CheckpointError(
                f"{part.path} is a whole checkpoint, and others here are parts of nodes: was TTP_SHARED_DIRS changed? Move the one kind"
                " to a folder of its own"
            )
        writes.setdefault(part.manifest.step, {}).setdefault(write_of(part.manifest), []).append(part)
    plan = choose(
        folders,
        [_step(step, writes[step]) for step in sorted(writes, reverse=True)],
        keep,
        lambda step, deep: _fault_of(writes[step.step], advance, deep=deep),
        partial=partial,
    )
    plan = replace(plan, left=(*plan.left, *(Step(step_of(path), (path,), error=MEANING) for path in others)))
    if not plan.kept:
        raise CheckpointError(
            f"no step is whole in {', '.join(map(str, folders))}, so nothing is removed: "
            f"{'; '.join(f'step {step.step}: {step.error}' for step in plan.left[:3])}. Each node has its own parts: name the folders of"
            " all nodes, PATH PATH ..., in one command"
        )
    return replace(plan, left=(*plan.left, *broken))


def _step(step: int, writes: Mapping[Write, Sequence[NodePart]]) -> Step:
    parts = [part for some in writes.values() for part in some]
    may_be_finite = all(part.manifest.finite is not False for part in parts)
    return Step(step, tuple(sorted(part.path for part in parts)), may_be_finite)


def _fault_of(writes: Mapping[Write, Sequence[NodePart]], advance: Callable[[int], None], *, deep: bool) -> str:
    """Say what the newest write of a step lacks; empty: one is whole. deep: checksums and tables, not sizes alone."""
    fault = ""
    for write in sorted(writes, reverse=True):
        try:
            _check_write(writes[write], advance, deep=deep)
        except (CorruptCheckpoint, OSError) as error:
            fault = fault or str(error)
        else:
            return ""
    return fault


def _check_write(parts: Sequence[NodePart], advance: Callable[[int], None], *, deep: bool) -> None:
    """Raise CorruptCheckpoint unless every file that a part lists is in one of them."""
    files = {
        file.name: (file, part.manifest.hosts[file.rank])
        for part in parts
        for file in part.manifest.files
        if file.name != dcp.METADATA_NAME
    }
    owners: dict[Path, list[FileEntry]] = {}
    for file, host in files.values():
        owners.setdefault(_owner(file, host, parts, advance, deep=deep), []).append(file)
    if deep:
        mine = [file for some in owners.values() for file in some]
        check_complete(parse_tables(mine, (body for path, some in owners.items() for body in read_tables(path, some))))


def _owner(
    file: FileEntry, host: str, parts: Sequence[NodePart], advance: Callable[[int], None], *, deep: bool
) -> Path:
    """Return a part that has a file, as it was written on node `host`."""
    altered = ""
    for part in parts:
        path = part.path / file.name
        if not path.is_file() or path.stat().st_size != file.nbytes:
            continue
        if not deep:
            return part.path
        try:
            checksum.check_file(path, file, advance)
        except CorruptCheckpoint as error:
            altered = altered or str(error)
        else:
            return part.path
    raise CorruptCheckpoint(
        altered or f"{file.name}, which rank {file.rank} wrote on node {host}, is in none of the folders"
    )
