"""One simulated rank's work thread where every host has directories of its own: it publishes its host's piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.disk import DiskError, Manifest, final_name, look_at
from tests.simulation.pieces import Key, OwnDisks, key_of
from tests.simulation.work import Worker
from ttp.checkpoint.publish import PUBLISH_TRIES
from ttp.proto.messages import FileEntry, PublishOrder

if TYPE_CHECKING:
    from tests.simulation.rank import Rank


class PieceWorker(Worker):
    """Publishes in the steps of `publish_part`: claim, manifest, rename, tracker, answer; each a moment of its own."""

    def __init__(self, process: Rank) -> None:
        super().__init__(process)
        assert isinstance(self.job.disk, OwnDisks)
        self.disks: OwnDisks = self.job.disk
        self._claims = 0
        self._tries = 0

    def _begin_publish(self, order: PublishOrder) -> None:
        self.publishing, self._tries = True, 0
        self._later("claim", 0.0025, self._claim, order)
        self.job.happened("publishing", self.rank)

    def _claim(self, order: PublishOrder) -> None:
        root, self._claims = self._root(order), self._claims + 1
        claim = f"{order.tmp_name}_claim_{self.rank}_{self._claims}"
        try:
            done = self._is_done(order)
            if done:
                self.disks.check_fsync(self.rank, root)
            elif not self.disks.claim(self.rank, root, order.tmp_name, claim, self._mine(order)):
                self._look_again(order, claim, DiskError(f"{order.tmp_name} is gone"))
                return
        except DiskError as error:
            self._failed(error)
            return
        if done:
            self._later("tracker", 0.005, self._replace_tracker, order)
        else:
            self._later("manifest", 0.0025, self._complete, order, claim)
        self.job.happened("claimed", self.rank)

    def _look_again(self, order: PublishOrder, claim: str, error: DiskError) -> None:
        """Another publisher of this host came first, if the claim is gone."""
        self._tries += 1
        if (self._root(order), claim) in self.disks.directories or self._tries == PUBLISH_TRIES:
            self._failed(error)
        else:
            self._later("claim", 0.0025, self._claim, order)

    def _complete(self, order: PublishOrder, claim: str) -> None:
        """Keep what this host's ranks reported, and list the files of all hosts."""
        root = self._root(order)
        try:
            self.disks.check(self.rank, root)
            manifest = self._piece(order, claim)
            self.disks.check_fsync(self.rank, root)
        except DiskError as error:
            self._look_again(order, claim, error)
            return
        piece = self.disks.directories[root, claim]
        mine = {entry.name for entry in self._mine(order)}
        piece.files = {name: file for name, file in piece.files.items() if name in mine}
        piece.manifest = manifest
        self._later("rename", 0.005, self._place, order, claim)
        self.job.happened("manifest written", self.rank)

    def _piece(self, order: PublishOrder, claim: str) -> Manifest:
        """Return the manifest. This host's files must be there with the size that their writers reported."""
        here = self.disks.directories.get((self._root(order), claim))
        if here is None:
            raise DiskError(f"{claim} is gone")
        look_at(here.files, self._mine(order))
        host_state = self.replica.host_states.get(order.step)
        if host_state is None:
            raise DiskError(f"no host state of step {order.step} is kept")
        names = tuple(entry.name for result in order.results for entry in result.files)
        return Manifest(order.step, names, host_state, order.term, order.tmp_name, order.record)

    def _place(self, order: PublishOrder, claim: str) -> None:
        """Rename the piece; one that has its name is renamed first, unless it is this write's or a later term's."""
        root = self._root(order)
        try:
            self.disks.check(self.rank, root)
            if not self.disks.place(root, claim, self._key(order), self.job.committed()) and not self._is_done(order):
                self.disks.supersede(root, order.step)
                self._later("rename", 0.0025, self._place, order, claim)
                self.job.happened("superseded", self.rank)
                return
        except DiskError as error:
            self._look_again(order, claim, error)
            return
        try:
            self.disks.check_fsync(self.rank, root)
        except DiskError as error:
            self._failed(error)
            return
        self._later("tracker", 0.005, self._replace_tracker, order)
        self.job.happened("renamed", self.rank)

    def _is_done(self, order: PublishOrder) -> bool:
        """True when this write's piece is published. Raises DiskError when a later term's is."""
        there = self.disks.directories.get((self._root(order), final_name(order.step)))
        if there is None or there.manifest is None:
            return False
        if there.manifest.term > order.term:
            raise DiskError(f"{final_name(order.step)} was published by a controller of term {there.manifest.term}")
        return key_of(there.manifest) == self._key(order)

    def _key(self, order: PublishOrder) -> Key:
        return Key(order.step, order.term, order.tmp_name)

    def _mine(self, order: PublishOrder) -> list[FileEntry]:
        """Return the files that this host's ranks have written."""
        hosts = self.job.hosts
        files = [file for result in order.results for file in result.files]
        return [file for file in files if hosts[file.rank] == hosts[self.rank]]
