"""How a rank comes to its job's controller: rank 0 starts it, the others find it through the store that the ranks met in.

Owns the client of that store, the controller's process where this rank has started it, and what the node's agent reads of it.
Never speaks to it as a rank does: that is the processor's.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ttp import files
from ttp.config import Settings, ordered_by
from ttp.controller.agent_link import request_shutdown
from ttp.controller.journal import set_aside, set_aside_earlier
from ttp.controller.process import CannotListen, ControllerProcess, unwritable_log_dir
from ttp.errors import ConfigError, ControllerError, NotWritable
from ttp.exchange import controller_file, discovery, last_step, saved_alone, time_marks
from ttp.exchange.sealed_store import attempts_seal, sealed
from ttp.groups.vacancy import vacant
from ttp.runtime.standby import start_job_controller

log = logging.getLogger("ttp")

STORE_TIMEOUT = timedelta(seconds=60)
CONTROLLER_END_S = 10.0
OVER_S = 2.0
"""So long a controller may take to end by itself once it has let its only rank go."""


class JobController:
    """The job's controller, as one rank comes to it."""

    def __init__(self, settings: Settings, log_dir: Path, rank: int, world_size: int) -> None:
        self._settings = settings
        self._log_dir = log_dir
        self._rank = rank
        self._world_size = world_size
        self._process: ControllerProcess | None = None
        self._client: Store | None = None

    @property
    def reports_to_launcher(self) -> bool:
        """Say whether ttprun shows what the job survives: it reads the controller's journal."""
        return self._settings.launched and self._settings.master_port > 0

    def open(self, timeout_s: float) -> str:
        """Start it on rank 0, find it elsewhere, and return its address. Raises ControllerError, ConfigError, NotWritable."""
        if self.reports_to_launcher:
            number = self._settings.round_number
            self.store().set(discovery.process_key(number, self._rank), discovery.process_text())
        return self._start() if self._rank == 0 and not vacant() else self._find(timeout_s)

    def wait_for_folder(self, timeout_s: float) -> None:
        """Wait, before a standby is started, until rank 0 has moved what an earlier launch has left in the folder: a journal that was begun
        before would be moved with it, and what the standby does would be in no report. Raises as `open` does."""
        discovery.find(self.store(), self._settings.round_number, self._rank, timeout_s, key=discovery.folder_key)

    def _start(self) -> str:
        settings, log_dir = self._settings, self._log_dir
        try:
            _set_earlier_files_aside(log_dir, settings.round_number)
            if self._world_size > 1:
                discovery.publish_folder(self.store(), settings.round_number)
            self._process = start_job_controller(settings, 0, self._world_size, log_dir)
        except CannotListen as error:
            refused = self._refused_port(error)
            self._publish_failure(refused)
            raise refused from None
        except (ControllerError, NotWritable) as error:
            self._publish_failure(error)
            raise
        address = self._process.address
        self.write_for_agent(address)
        if self.reports_to_launcher:
            self.store().set(discovery.log_dir_key(settings.round_number), str(log_dir.resolve()))
        if self._world_size > 1:
            discovery.publish(self.store(), settings.round_number, address, self._process.pid)
        return address

    def _publish_failure(self, error: Exception) -> None:
        if self._world_size > 1:
            discovery.publish_failure(self.store(), self._settings.round_number, error)

    def _refused_port(self, error: CannotListen) -> Exception:
        """A port that was taken before the job has begun stays taken: a configuration error. At a restart it may be one that an earlier
        attempt's controller still has."""
        port = self._settings.controller_port
        return (
            ConfigError(f"invalid TTP_CONTROLLER_PORT={port}: {error}")
            if port and self._settings.round_number == 0
            else error
        )

    def _find(self, timeout_s: float) -> str:
        address = ordered_by() if vacant() else ""  # the store has the first controller, which need not lead any more
        address = address or discovery.find(self.store(), self._settings.round_number, self._rank, timeout_s)
        if not self._settings.one_node:
            discovery.check_name(address, self._rank)
        if not vacant():  # the agent knows who leads by now, which this entry need not
            self.write_for_agent(address)
        return address

    def write_for_agent(self, *addresses: str) -> None:
        """Have this node's agent find them, before this rank registers: the store may be slow when it matters."""
        settings = self._settings
        if not (settings.launched and settings.attempt_dir and settings.local_rank <= 0):
            return
        pid = self._process.pid if self._process is not None else 0
        known = controller_file.Controllers(
            addresses if self._world_size > 1 else (), pid, str(self._log_dir.resolve())
        )
        try:
            controller_file.write(Path(settings.attempt_dir), known)
        except OSError as error:
            log.warning(
                "TTP_ATTEMPT_DIR=%s cannot be written (%s): the agent finds the controllers through the workers' store alone, which may be"
                " too late for a fault in the first seconds. Make the directory visible to the ranks",
                settings.attempt_dir, error.strerror or error,
            )  # fmt: skip

    def store(self) -> Store:
        """Return a client of the store that the ranks met in: one for the whole attempt, as making one may take seconds."""
        settings = self._settings
        if not settings.master_port:
            raise ConfigError(
                f"rank {self._rank}: MASTER_ADDR and MASTER_PORT are not set, so the ranks cannot find the controller;"
                " start them with ttprun or torchrun, or set ENABLE_TTP=False"
            )
        if self._client is None:
            self._client = self.open_store()
        return self._client

    def open_store(self) -> Store:
        """Connect to it; its entries are sealed where this process has credentials. Raises ControllerError."""
        settings = self._settings
        client = TCPStore(settings.master_addr, settings.master_port, is_master=False, timeout=STORE_TIMEOUT)
        return sealed(client, attempts_seal(settings.start_name, log))

    def forget_store(self) -> None:
        self._client = None

    def close(self, settled: bool) -> None:
        """End the controller where this rank has started it and no other rank can need it; wait for one whose job is over.

        `settled`: the outcome of the job is.
        """
        process = self._process
        if process is None:
            return
        if self._world_size == 1:
            self._end_own(process, settled)
        elif not settled:
            log.debug("the controller (pid %d) stays for the other ranks, and exits after them", process.pid)
            return
        if process.wait(CONTROLLER_END_S) is None:
            log.warning(
                "the controller (pid %d) has not ended within %.0f s of the job's end; look into %s, and end it by SIGTERM",
                process.pid, CONTROLLER_END_S, self._log_dir,
            )  # fmt: skip

    def _end_own(self, process: ControllerProcess, settled: bool) -> None:
        """End it by message while it leads, as SIGTERM has it wait for a rank that comes back."""
        try:
            if not settled:
                request_shutdown(process.address, job_id=self._settings.start_name, reason="its only rank has left")
                return
            if process.wait(OVER_S) is not None:  # it ends by itself
                return
        except ControllerError as error:
            log.debug("%s; sending SIGTERM", error)
        process.terminate()


def _set_earlier_files_aside(log_dir: Path, attempt: int) -> None:
    """Move what an earlier launch has written of this attempt: whatever is there later is this launch's, by any clock. Raises NotWritable."""
    try:
        files.make_folder(log_dir)
        set_aside_earlier(log_dir, attempt)
        for of_rank_zero in (last_step, saved_alone, time_marks):
            set_aside(of_rank_zero.path_of(log_dir, attempt))
    except OSError as error:
        raise unwritable_log_dir(log_dir, error) from None
