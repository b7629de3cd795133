"""The copy keeper of a node: takes its ranks' copies, sends them to the next node, keeps another node's, and writes checkpoints of them.

A process of low priority below the agent (`__main__.py`). The memory is the agent's, so a keeper that dies loses no copy; the next one finds
them by their records. Decides nothing: which step is saved is for the agents (`rules.choose`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from ttp import addresses
from ttp.checkpoint.format.durable import fsync_directory, newest_step
from ttp.checkpoint.staging import discard_staging, make_staging
from ttp.checkpoint.write import merge_results, write_share
from ttp.copies import transfer
from ttp.copies.checkpoints import publish_copy, read_share, share_name, write_share_file
from ttp.copies.memory import NoRoom, of_save, own, received
from ttp.copies.region import Description, Region, data_bytes, region_bytes
from ttp.errors import CheckpointError
from ttp.fork_server import frames
from ttp.fork_server.linux import LowShare, end_with_parent
from ttp.identity.own import process_behind
from ttp.inputs import checked
from ttp.proto.messages import Cause, CauseKind, FileEntry, ShareResult

log = logging.getLogger("ttp.copies")

PEER_S = 60.0
"""How long a copy waits for the next node's address."""
NICE = 19
SHARES_S = 3600.0
"""Until all ranks' shares of a save are written, by processes of low priority."""
LOOK_S = 0.05
_CHUNK = 16 << 20
_NO_MESSAGE = (ValueError, struct.error, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""What a request that no rank sends may raise."""


class Damaged(CheckpointError):
    """A copy is not what it was when it was taken."""

    def __init__(self, name: str, step: int, what: str) -> None:
        super().__init__(f"the copy of {name} at step {step} is {what}")
        self.name = name


class Keeper:
    """One node's. A thread for each connection: of a rank, of another keeper, of the agent's orders."""

    def __init__(self, memory: socket.socket) -> None:
        """memory: where the agent gives it memory."""
        self._memory = memory
        self._memory_lock = threading.Lock()  # one request at a time
        self._lock = threading.Condition()  # guards all below
        self._regions: dict[str, Region] = {}
        self._sums: dict[tuple[str, int], tuple[int, str]] = {}
        """(memory, slot) -> sequence and checksum of the copy."""
        self._attempt = -1
        """-1: none has begun."""
        self._job_id = ""
        self._peer = ""
        self._no_peer = ""
        """Why no copy is sent in this attempt; empty: copies are sent."""
        self._server: Any = None
        self._client: Any = None
        self._listener: socket.socket | None = None
        self._low_share = LowShare(NICE)
        for name, size in self._ask({"do": "all"})[0].get("memories", {}).items():
            self._open(name, size, 0)

    # --- memory ---

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._memory_lock:
            frames.send(self._memory, request)
            return frames.receive(self._memory)

    def _open(self, name: str, nbytes: int, written: int) -> tuple[Region, int]:
        """Return the memory of this name, mapped, and its descriptor, which the caller closes. Raises NoRoom."""
        answer, descriptors = self._ask({"do": "obtain", "name": name, "nbytes": nbytes, "written": written})
        if "error" in answer:
            raise NoRoom(answer["error"])
        mapping = mmap.mmap(descriptors[0], nbytes)
        region = Region(memoryview(mapping))
        region.load()
        with self._lock:
            self._regions[name] = region
        return region, descriptors[0]

    # --- ranks ---

    def serve_rank(self, channel: socket.socket) -> None:
        """Talk to one rank until it ends, or sends what no rank does."""
        try:
            self._serve_rank(channel)
        except (EOFError, OSError):
            return
        except _NO_MESSAGE as error:
            log.warning("a rank's connection ended: got what is not a request: %s: %s", type(error).__name__, error)

    def _serve_rank(self, channel: socket.socket) -> None:
        with channel:
            _, uid = process_behind(channel)
            if uid != os.geteuid():
                return
            request, _ = frames.receive(channel)
            rank, written = (checked.integer(*checked.field(request, each, "")) for each in ("rank", "written"))
            nbytes = checked.integer(*checked.field(request, "nbytes", ""), region_bytes(()))
            saying = threading.Lock()
            name = of_save(rank) if request["use"] == "save" else own(rank)
            try:
                region, descriptor = self._open(name, nbytes, written)
            except (NoRoom, OSError) as error:
                frames.send(channel, {"error": str(error)})
                return
            self._forget_sums(name)
            frames.send(channel, {}, [descriptor])
            os.close(descriptor)
            peer: list[socket.socket] = []

            def say(answer: dict[str, Any]) -> None:
                with saying, contextlib.suppress(OSError):
                    frames.send(channel, answer)

            try:
                while True:
                    request, _ = frames.receive(channel)
                    match request["do"]:
                        case "described":
                            region.load()
                        case "copied":
                            say({"safe": request["step"], "why": self._secure(name, region, request, peer)})
                        case "save":
                            threading.Thread(target=self._save, args=(name, request, say), daemon=True).start()
            finally:
                for each in peer:
                    each.close()

    def _secure(self, name: str, region: Region, request: dict[str, Any], peer: list[socket.socket]) -> str:
        """Note a copy's checksum, and send it to the next node where that is asked for; return why it is not there, empty: it is."""
        slot, sequence = int(request["slot"]), int(request["sequence"])
        if not request["send"]:
            checksum = checksum_of(region, slot)
            self._note(name, region, slot, sequence, checksum)
            return "" if checksum else "the copy is not whole"
        try:
            described = bool(peer)
            if not peer:
                with self._lock:  # ranks come before the agent's first order is carried out
                    met = self._lock.wait_for(lambda: self._attempt >= 0 and (self._peer or self._no_peer), PEER_S)
                    if self._no_peer:
                        raise OSError(self._no_peer)
                    if not met:
                        raise OSError(f"the next node's keeper did not give its address within {PEER_S:.0f} s")
                    address, security = self._peer, self._client
                peer.append(transfer.connect(address, security))
                transfer.check_keeper(peer[0], self._job_id)
            checksum, whole = transfer.send(peer[0], region, slot, sequence, float(request["within_s"]), described)
        except (OSError, ValueError, EOFError) as error:
            for each in peer:
                each.close()
            peer.clear()
            self._note(name, region, slot, sequence, checksum_of(region, slot))
            return f"the next node has not got it: {error}"
        self._note(name, region, slot, sequence, checksum)
        return "" if whole else "the copy is not whole"

    def _note(self, name: str, region: Region, slot: int, sequence: int, checksum: str) -> None:
        """Remember a copy's checksum. Not where the memory has been opened anew since: a connection of an attempt that has ended may learn late that the
        next node is lost."""
        with self._lock:
            if self._regions.get(name) is region:
                self._sums[name, slot] = sequence, checksum

    def _forget_sums(self, name: str) -> None:
        """A rank begins to use its memory: its sequence numbers of an earlier attempt come again."""
        with self._lock:
            self._sums = {place: found for place, found in self._sums.items() if place[0] != name}

    # --- other keepers ---

    def serve_keepers(self, listener: socket.socket) -> None:
        """Take other keepers' connections until the listener is closed."""
        for channel in connections(listener):
            threading.Thread(target=self._serve_keeper, args=(channel,), daemon=True).start()

    def _serve_keeper(self, channel: socket.socket) -> None:
        channel.settimeout(transfer.ANSWER_S)
        try:
            with self._lock:
                security, job_id = self._server, self._job_id
            if security is not None:
                channel = security.wrap_socket(channel, server_side=True)
            transfer.check_keeper(channel, job_id)
            channel.settimeout(None)  # copies may be far apart
            while True:
                try:
                    taken = transfer.receive(channel, self._room)
                except (ValueError, CheckpointError, NoRoom) as error:
                    transfer.refuse(channel, str(error))
                    return
                if taken is None:
                    return
                region, slot, sequence, checksum = taken
                assert region.description is not None
                self._note(received(region.description.rank), region, slot, sequence, checksum)
        except (OSError, ValueError, EOFError) as error:
            log.warning("a connection of another node's keeper ended: %s", error)
        finally:
            channel.close()

    def _room(self, header: dict[str, Any], description: bytes) -> Region:
        """Return the memory for a copy that comes. Raises ValueError, NoRoom."""
        rank, attempt, slot = (
            checked.integer(*checked.field(header, each, "copy")) for each in ("rank", "attempt", "slot")
        )
        name = received(rank)
        with self._lock:
            if attempt != self._attempt:
                raise ValueError(f"got a copy of attempt {attempt}, expected one of {self._attempt}")
            region = self._regions.get(name)
        if description:
            region = self._described(name, Description.decode(description), header)
        known = region.description if region is not None else None
        if region is None or known is None or known.attempt != attempt:
            raise ValueError(f"got a copy of {name} without its description")
        if slot >= len(known.slots):
            raise ValueError(f"invalid copy: slot: got {slot}, expected 0 to {len(known.slots) - 1}")
        return region

    def _described(self, name: str, description: Description, header: dict[str, Any]) -> Region:
        if (description.rank, description.attempt) != (header["rank"], header["attempt"]):
            raise ValueError(
                f"got a copy of {name} with the description of rank {description.rank}, attempt {description.attempt}"
            )
        region, descriptor = self._open(name, region_bytes(description.slots), data_bytes(description.slots))
        os.close(descriptor)
        if region.description != description:
            self._forget_sums(name)
        region.describe(description)
        return region

    # --- the agent's orders ---

    def serve_agent(self, channel: socket.socket) -> None:
        """Carry out the agent's orders until it ends."""
        orders: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "begin": self._begin,
            "credentials": self._renew_credentials,
            "peer": self._set_peer,
            "offers": self._offers,
            "write": self._write,
            "publish": self._publish,
            "discard": self._discard,
        }
        while True:
            request, _ = frames.receive(channel)
            try:
                answer = orders[request["do"]](request)
            except (CheckpointError, OSError, ValueError) as error:
                answer = {"error": str(error), "damaged": error.name if isinstance(error, Damaged) else ""}
            frames.send(channel, answer)

    def _begin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Another attempt begins. Answer with this keeper's address for the others; empty: there is no other node."""
        listener, no_peer = self._listener, "" if request["host"] else "the site's certificates name no keeper"
        security = self._server, self._client
        try:
            security = transfer.contexts(request["credentials"])
            if listener is None and request["host"]:
                listener = listen(request["host"], request["port"])
        except (OSError, ValueError) as error:
            no_peer = f"this node's keeper could not begin: {error}"
            raise
        finally:
            with self._lock:
                self._attempt, self._job_id, self._peer = request["attempt"], request["job_id"], ""
                self._no_peer, (self._server, self._client) = no_peer, security
                kept = set(self._ask({"do": "all"})[0].get("memories", {}))
                self._regions = {name: region for name, region in self._regions.items() if name in kept}
                self._sums = {place: found for place, found in self._sums.items() if place[0] in kept}
                before, self._listener = self._listener, listener
                self._lock.notify_all()
        if listener is not None and listener is not before:
            threading.Thread(target=self.serve_keepers, args=(listener,), daemon=True).start()
        port = self._listener.getsockname()[1] if self._listener is not None else 0
        return {"address": f"{request['host']}:{port}" if port else ""}

    def _renew_credentials(self, request: dict[str, Any]) -> dict[str, Any]:
        """Those before expire soon. Connections that there are go on with them."""
        with self._lock:
            self._server, self._client = transfer.contexts(request["credentials"])
        return {}

    def _set_peer(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._peer = request["address"]
            self._lock.notify_all()
        return {}

    def _offers(self, request: dict[str, Any]) -> dict[str, Any]:
        offers: list[dict[str, Any]] = []
        groups: dict[int, set[str]] = {}
        directories: list[str] = []
        passed_over: dict[str, int] = {}
        with self._lock:
            regions = dict(self._regions)
        for name, region in sorted(regions.items()):
            region.load()  # its rank may have ended just when it had described it
            if (what := region.description) is None or name == of_save(what.rank):
                continue
            directories = what.facts["directories"]
            passed_over |= what.facts["passed_over"]
            groups.setdefault(what.attempt, set()).update(what.groups)
            for copy in region.copies():
                held = sorted({place.group for place in what.slots[copy.slot]})
                offers.append(
                    {
                        "name": name,
                        "rank": what.rank,
                        "attempt": what.attempt,
                        "step": copy.step,
                        "slot": copy.slot,
                        "groups": held,
                    }
                )
        newest = newest_step(directories, passed_over)
        return {
            "offers": offers,
            "groups": {attempt: sorted(names) for attempt, names in groups.items()},
            "directories": directories,
            "newest": newest,
        }

    def _region(self, name: str, slot: int, step: int) -> Region:
        """Return a region whose slot has this step as it was copied. Raises Damaged."""
        with self._lock:
            region, noted = self._regions.get(name), self._sums.get((name, slot))
        copy = region.read(slot) if region is not None else None
        if region is None or copy is None or copy.step != step:
            raise Damaged(name, step, "gone")
        if noted is not None and noted[0] == copy.sequence and noted[1] and checksum_of(region, slot) != noted[1]:
            raise Damaged(name, step, "not what it was when it was taken")
        return region

    def _write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write what these copies have of these groups; durable when this returns."""
        result = ShareResult(())
        for number, source in enumerate(request["sources"]):
            region = self._region(source["name"], source["slot"], request["step"])
            result = merge_results(
                result, self._write_one(region, source["slot"], source["groups"], request, f"c{number}")
            )
        return {"files": [asdict(file) for file in result.files]}

    @staticmethod
    def _write_one(
        region: Region, slot: int, groups: Sequence[str], request: Mapping[str, Any], suffix: str
    ) -> ShareResult:
        what = region.description
        assert what is not None
        return write_share(
            request["directory"], request["tmp_name"], what.rank, region.held(slot, groups), {}, suffix=suffix,
            digests=bool(what.facts["sign_key"]),
        )  # fmt: skip

    def _publish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Publish what all nodes have written. `name`, `slot`: the copy whose host state goes with it."""
        region = self._region(request["name"], request["slot"], request["step"])
        cause = Cause(CauseKind(request["cause"]), tuple(request["ranks"]), request["text"])
        files = tuple(FileEntry(**file) for file in request["files"])
        return {"path": publish_copy(region, request["slot"], request, cause, (ShareResult(files),))}

    def _discard(self, request: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            discard_staging(request["directory"], request["tmp_name"])
        return {}

    # --- saves that training does not wait for ---

    def _save(self, name: str, request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        """Write a rank's share of a save; for the rank that asks, publish all. No rank waits for it, as for copies: it gets little of the CPU."""
        with self._low_share:
            say(self._saved(name, request))

    def _saved(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        folder, step = Path(request["directory"]) / request["tmp_name"], request["step"]
        mine: dict[str, Any] = {}
        attempt = -1
        try:
            region = self._region(name, 0, step)
            assert region.description is not None
            attempt = region.description.attempt  # another one may have begun meanwhile
            groups = sorted({place.group for place in region.description.slots[0]})
            result = self._write_one(region, 0, groups, request, "s")
            mine["files"] = result.files
        except (CheckpointError, OSError) as error:
            mine["error"] = str(error)
        try:
            make_staging(folder.parent, folder.name)
            write_share_file(folder, request["rank"], mine)
            fsync_directory(folder)
        except (CheckpointError, OSError) as error:
            mine.setdefault("error", str(error))
        if request["publishes"]:
            try:
                shares = self._shares(folder, request["ranks"], mine, attempt)
                cause = Cause(CauseKind(request["cause"]), (), f"{request['cause']} checkpoint of step {step}")
                mine = {"path": publish_copy(region, 0, request, cause, shares)}
            except (CheckpointError, OSError, ValueError) as error:
                with contextlib.suppress(CheckpointError, OSError):
                    discard_staging(folder.parent, folder.name)
                mine = {"error": str(error)}
        return {"saved": step, "path": mine.get("path", ""), "error": mine.get("error", "")}

    def _shares(self, folder: Path, ranks: int, mine: Mapping[str, Any], attempt: int) -> list[ShareResult]:
        """Wait for the shares of all ranks, until their attempt has ended. Raises CheckpointError."""
        shares = {0: dict(mine)}
        until_s = time.monotonic() + SHARES_S
        while "error" not in (last := shares[max(shares)]) and len(shares) < ranks:
            path = folder / share_name(len(shares))
            if path.exists():
                shares[len(shares)] = read_share(path)
            elif self._attempt > attempt:  # a keeper that was started again may not have begun it yet
                raise CheckpointError("the attempt has ended before all ranks' shares were written")
            elif time.monotonic() > until_s:
                raise CheckpointError(f"rank {len(shares)} has written no share within {SHARES_S:.0f} s")
            else:
                time.sleep(LOOK_S)
        if "error" in last:
            raise CheckpointError(last["error"])
        return [ShareResult(tuple(share["files"])) for share in shares.values()]


def listen(host: str, port: int) -> socket.socket:
    """Listen where the keeper before did, so that other nodes' keepers find this one; where that cannot be, or 0, at any port."""
    address = addresses.address_of(host)
    with contextlib.suppress(OSError):
        return addresses.listen(address, port)
    return addresses.listen(address, 0)


def connections(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield what connects, until the listener is closed. A moment without room for another descriptor ends nothing."""
    while listener.fileno() >= 0:
        try:
            channel, _ = listener.accept()
        except OSError:
            time.sleep(LOOK_S)
        else:
            yield channel


def checksum_of(region: Region, slot: int) -> str:
    """Return the checksum of what a slot holds, as a transfer takes it; empty: it holds nothing."""
    copy = region.read(slot)
    if copy is None:
        return ""
    digest, data = xxhash.xxh3_128(copy.state), region.data(slot)
    for start in range(0, len(data), _CHUNK):
        digest.update(data[start : start + _CHUNK])
    return digest.hexdigest()


def main() -> int:
    """Run until the agent ends. The standard input is the agent's channel: first the sockets for memory and for the ranks, then its orders."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the agent
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    orders = socket.socket(fileno=os.dup(0))
    _, descriptors = frames.receive(orders)
    memory, ranks = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    keeper = Keeper(memory)

    def accept() -> None:
        for channel in connections(ranks):
            threading.Thread(target=keeper.serve_rank, args=(channel,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        keeper.serve_agent(orders)
    return 0
