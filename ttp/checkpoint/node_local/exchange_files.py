"""Find the newest checkpoint whose files are on several nodes, and move to each node what it lacks.

All ranks call `find_newest`, when an attempt begins, once a process group is up. One rank of every node, its *directory leader*, lists
the node's directories; the nodes exchange what they have, verify it together, and take the newest checkpoint of
which every file is found somewhere. Its tables of contents say which file holds what; a node then receives the files that its
ranks will read and that it has not, in chunks, checked on arrival, renamed into place when whole.

Owns the agreement and the moving. Never changes a file that is there; a part keeps its manifest.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ttp.checkpoint.format import checksum, dcp
from ttp.checkpoint.format.durable import fsync_directory, step_directory_name, write_durably
from ttp.checkpoint.format.file_index import Contents, parse_tables, read_tables
from ttp.checkpoint.format.manifest import MANIFEST_NAME, Manifest, from_bytes
from ttp.checkpoint.format.signature import SIGNATURE_NAME
from ttp.checkpoint.node_local.parts import NodePart, read_parts, supersede, write_of
from ttp.checkpoint.reader import Reader, check_tensors
from ttp.checkpoint.store import Peers, Request
from ttp.checkpoint.verify import check_complete, share_of_files
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import FileEntry
from ttp.text.wording import counted, size_text

CHUNK_BYTES = 4 << 20
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Move:
    """One file's way to a node that lacks it; ranks are those nodes' directory leaders."""

    file: FileEntry
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Which ranks share directories: those with the same host."""

    hosts: tuple[str, ...]

    def leader_of(self, rank: int) -> int:
        return self.hosts.index(self.hosts[rank])

    def leaders(self) -> list[int]:
        return sorted({self.leader_of(rank) for rank in range(len(self.hosts))})

    def place(self, rank: int) -> tuple[int, int]:
        """Return (i, n): the rank is the i-th of its node's n."""
        mates = [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]
        return mates.index(rank), len(mates)


def plan_moves(
    files: Sequence[FileEntry], owners: Mapping[str, Sequence[int]], needed: Mapping[int, set[str]]
) -> list[Move]:
    """Say which directory leader sends which file to which (every rank computes the same). The load is spread over the owners.

    owners: the leaders that have a file, by its name; needed: the names that each leader's node reads.
    """
    sent = dict.fromkeys(sorted({rank for ranks in owners.values() for rank in ranks}), 0)
    moves = []
    for file in sorted(files, key=lambda file: file.name):
        for target in sorted(needed):
            if file.name in needed[target] and target not in owners[file.name]:
                source = min(owners[file.name], key=lambda rank: (sent[rank], rank))
                sent[source] += file.nbytes
                moves.append(Move(file, source, target))
    return moves


def moved_texts(moves: Sequence[Move], hosts: Sequence[str]) -> list[str]:
    """Describe what was moved, a line for each pair of nodes."""
    texts = []
    for source, target in sorted({(move.source, move.target) for move in moves}):
        files = [move.file for move in moves if (move.source, move.target) == (source, target)]
        what = f"{counted(len(files), 'file')}, {size_text(sum(file.nbytes for file in files))}"
        texts.append(f"moved {what}, from node {hosts[source]} to node {hosts[target]}")
    return texts


def find_newest(
    paths: Sequence[str], nodes: NodeFiles, ranks: Peers, request: Request, stranger: Callable[[Manifest], str]
) -> Reader | None:
    """Return the newest checkpoint that the nodes have together, readable for this rank at the returned path; or None.

    paths: the published names (`list_parts`) that may be chosen on this node. stranger: returns why a part may not be chosen; empty: it may. Raises CheckpointMismatch on every rank (another model),
    CheckpointError (a node cannot take its files).
    """
    search = _Search(nodes, ranks, request)
    parts: dict[tuple[int, int, int, str, str], NodePart] = {}
    for part in read_parts(paths, request.on_skip, request.key):
        if why := stranger(part.manifest):
            request.on_skip(part.path, why)
            continue
        parts.setdefault((part.manifest.step, *write_of(part.manifest)), part)
    skipped: list[str] = []
    offers = ranks.exchange([list(key) for key in parts] if search.leads else [])
    keys = sorted(
        {
            (int(s), int(start), int(term), str(name), str(launch))
            for offer in offers
            for s, start, term, name, launch in offer
        }
    )
    for key in reversed(keys):
        path = Path(request.save_dirs[0]) / step_directory_name(key[0])
        try:
            return search.take(parts.get(key), tuple(skipped))
        except CorruptCheckpoint as error:  # raised by all ranks alike
            skipped.append(f"{path}: {error}")
            request.on_skip(path, str(error))
    return None


def clean_unfinished(part: Path) -> None:
    """Remove what a killed leader has received only in part. Raises OSError."""
    for name in os.listdir(part):
        if _UNFINISHED.fullmatch(name):
            os.unlink(part / name)


@dataclass(frozen=True, slots=True)
class _Leading:
    """What all nodes go by: the manifest of one of them."""

    manifest: Manifest
    content: bytes
    """Of its file: a signature is of these bytes."""
    signature: bytes | None
    order: int
    """The place of its directory in the list."""


class _Search:
    """One rank's share in the search. Every method is called by all ranks, in the same order."""

    def __init__(self, nodes: NodeFiles, peers: Peers, request: Request) -> None:
        self.nodes = nodes
        self.peers = peers
        self.request = request
        self.save_dirs = [Path(folder) for folder in request.save_dirs]
        self.host = nodes.hosts[peers.index]
        self.leads = nodes.leader_of(peers.index) == peers.index

    def take(self, part: NodePart | None, skipped: tuple[str, ...]) -> Reader:
        """Make one checkpoint readable on every node. Raises CorruptCheckpoint on all ranks when it is not whole."""
        leading = self._leading(part)
        manifest, order = leading.manifest, leading.order
        self.request.check(manifest)
        files = [file for file in manifest.files if file.name != dcp.METADATA_NAME]
        owners = self._owners(part, files)
        contents = self._contents(part, files, owners)
        path = self._folder(part, order) / step_directory_name(manifest.step)
        check_tensors(path, check_complete(contents), self.request.expected)
        work = self._prepare(part, leading, contents, path)
        metadata = dcp.metadata_of(contents)
        moves = self._moves(work, files, owners, metadata)
        problem = ""
        for move in moves:
            if self.peers.index == move.source:
                assert part is not None
                self._send(part.path / move.file.name, move)
            elif self.peers.index == move.target:
                problem = self._receive(work, move) or problem
        self._fail_on(self.peers.exchange(problem))
        self._finish(work, path)
        for text in moved_texts(moves, self.nodes.hosts):
            self.request.report(text)
        return Reader(path, manifest, skipped, metadata)

    def _leading(self, part: NodePart | None) -> _Leading:
        """Return the manifest of the first node that has one, as it is on its disk."""
        mine: list[Any] = []
        if part is not None and self.leads:
            parents = [Path(os.path.realpath(folder)) for folder in self.save_dirs]
            parent = Path(os.path.realpath(part.path.parent))
            signature = None if part.signature is None else part.signature.hex()
            mine = [part.content.decode("latin-1"), signature, parents.index(parent)]
        text, signature, order = next(answer for answer in self.peers.exchange(mine) if answer)
        content, signed = text.encode("latin-1"), None if signature is None else bytes.fromhex(signature)
        return _Leading(from_bytes(content, "a node's manifest", self.request.key, signed), content, signed, int(order))

    def _folder(self, part: NodePart | None, order: int) -> Path:
        """Return where this node has the checkpoint, or takes it in: the directory of the others' name for it, if that serves."""
        if part is not None:
            return part.path.parent
        serving = [Path(folder) for folder in self.request.serving]
        return self.save_dirs[order] if self.save_dirs[order] in serving else serving[0]

    def _owners(self, part: NodePart | None, files: Sequence[FileEntry]) -> dict[str, list[int]]:
        """Return the leaders that have each file whole; ranks verify their node's files together."""
        here = [file for file in files if part is not None and _has(part.path, file)]
        index, count = self.nodes.place(self.peers.index)
        good: list[str] = []
        bad: dict[str, str] = {}
        for file in share_of_files(here, index, count):
            assert part is not None
            try:
                checksum.check_file(part.path / file.name, file)
            except (CorruptCheckpoint, OSError) as error:
                bad[file.name] = f"on node {self.host}: {error}"
            else:
                good.append(file.name)
        owners: dict[str, list[int]] = {file.name: [] for file in files}
        altered: dict[str, str] = {}
        for rank, (names, broken) in enumerate(self.peers.exchange([good, bad])):
            for name in names:
                owners[name].append(self.nodes.leader_of(rank))
            altered |= broken
        for file in files:
            if not owners[file.name]:
                reason = altered.get(file.name, f"it is on none of the {len(self.nodes.leaders())} nodes that are here")
                raise CorruptCheckpoint(f"{file.name}, which rank {file.rank} wrote, is missing: {reason}")
        return {name: sorted(ranks) for name, ranks in owners.items()}

    def _contents(
        self, part: NodePart | None, files: Sequence[FileEntry], owners: Mapping[str, Sequence[int]]
    ) -> Contents:
        """Return what is in all files; each one's first owner reads its table."""
        mine = [file for file in files if owners[file.name][0] == self.peers.index]
        tables: dict[str, str] = {}
        error = ""
        if part is not None and mine:
            try:
                read = [body.decode() for body in read_tables(part.path, mine)]
                tables = {file.name: body for file, body in zip(mine, read, strict=True)}
            except (CorruptCheckpoint, OSError, ValueError) as problem:
                error = str(problem)
        answers = self.peers.exchange([tables, error])
        if error := next((text for _, text in answers if text), ""):
            raise CorruptCheckpoint(error)
        every = {name: body for some, _ in answers for name, body in some.items()}
        return parse_tables(files, (every[file.name].encode() for file in files))

    def _prepare(self, part: NodePart | None, leading: _Leading, contents: Contents, final: Path) -> Path:
        """Return the folder in which this node's files come together: its part, or a new one."""
        name = f"{final.name}_tmp_gather_{uuid.uuid4().hex[:12]}"
        work, problem = part.path if part is not None else final.parent / name, ""
        if self.leads:
            try:
                work.mkdir(parents=True, exist_ok=True)
                clean_unfinished(work)
                if part is None:
                    write_durably(work / MANIFEST_NAME, leading.content)
                    if leading.signature is not None:
                        write_durably(work / SIGNATURE_NAME, leading.signature)
                dcp.write_metadata(work, contents, str(final), leading.manifest.attempt)
            except OSError as error:
                problem = f"node {self.host}: {error}"
        answers = self.peers.exchange([str(work), problem])
        self._fail_on([text for _, text in answers])
        return Path(answers[self.nodes.leader_of(self.peers.index)][0])

    def _moves(
        self, work: Path, files: Sequence[FileEntry], owners: Mapping[str, Sequence[int]], metadata: Metadata
    ) -> list[Move]:
        needed: dict[int, set[str]] = {}
        mine = dcp.files_of_runs(work, self.request.targets(), metadata)
        for rank, names in enumerate(self.peers.exchange(sorted(mine))):
            needed.setdefault(self.nodes.leader_of(rank), set()).update(names)
        return plan_moves(files, owners, needed)

    def _send(self, path: Path, move: Move) -> None:
        """Send all bytes, whatever fails here: the other side finds out what is wrong by the checksum."""
        failure = _Failure()
        stream = failure.keep(open, path, "rb")
        for chunk in _chunks(move.file):
            failure.keep(methodcaller("readinto", chunk), stream)
            self.peers.send(chunk, move.target)
        failure.close(stream)

    def _receive(self, work: Path, move: Move) -> str:
        """Receive all bytes, whatever fails here; return what went wrong."""
        unfinished = work / f".{move.file.name}.{uuid.uuid4().hex[:12]}"
        arrived, failure = checksum.for_file(move.file), _Failure()
        stream = failure.keep(open, unfinished, "xb")
        for chunk in _chunks(move.file):
            self.peers.receive(chunk, move.source)
            arrived.update(chunk)
            failure.keep(methodcaller("write", chunk), stream)
        failure.keep(methodcaller("flush"), stream)
        failure.keep(lambda: os.fsync(stream.fileno()))
        failure.close(stream)
        if not failure.text and arrived.text != move.file.checksum:
            failure.text = f"it arrived with checksum {arrived.text}, expected {move.file.checksum}"
        failure.keep(os.replace, unfinished, work / move.file.name)
        if not failure.text:
            return ""
        with contextlib.suppress(OSError):  # `clean_unfinished` removes it later
            unfinished.unlink(missing_ok=True)
        return f"{move.file.name} to node {self.nodes.hosts[move.target]}: {failure.text}"

    def _fail_on(self, problems: Sequence[str]) -> None:
        if text := next((problem for problem in problems if problem), ""):
            raise CheckpointError(f"a node cannot take the files that it needs for resuming: {text}")

    def _finish(self, work: Path, final: Path) -> None:
        """Give the folder its published name."""
        problem = ""
        if self.leads:
            try:
                fsync_directory(work)
                if work != final:
                    if final.is_dir():
                        supersede(final)
                    os.rename(work, final)
                    fsync_directory(final.parent)
            except OSError as error:
                problem = f"node {self.host}: {error}"
        self._fail_on(self.peers.exchange(problem))


def _has(path: Path, file: FileEntry) -> bool:
    try:
        return (path / file.name).stat().st_size == file.nbytes
    except OSError:
        return False


def _chunks(file: FileEntry) -> Iterator[memoryview]:
    """Yield memory of the size of each of the file's chunks, the same again and again."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, file.nbytes)))
    for begin in range(0, file.nbytes, CHUNK_BYTES):
        yield buffer[: min(CHUNK_BYTES, file.nbytes - begin)]


class _Failure:
    """The first refusal of the file system. Nothing is tried after it, and the bytes move on: the other node counts on them."""

    def __init__(self) -> None:
        self.text = ""

    def keep(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do it, unless something has failed."""
        try:
            return None if self.text else act(*arguments)
        except OSError as error:
            self.text = str(error)

    def close(self, stream: Any) -> None:
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
