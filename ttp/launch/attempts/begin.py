"""What an attempt needs before its workers start: its certificates, what copies in memory have saved, and the workers' variables."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerGroup

from ttp.launch.attempts.context import LaunchContext, set_variables
from ttp.launch.attempts.replacements import VACANT
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous

log = logging.getLogger("ttp.launch")


def begin_attempt(
    launching: LaunchContext,
    rendezvous: FreshStoreRendezvous,
    worker_group: WorkerGroup,
    job_id: str,
    start_id: str,
    attempt_dir: Path | None,
    vacant: str = "",
) -> None:
    """Called after the rendezvous, when no process of the last attempt runs any more. `vacant`: the workers' TTP_VACANT, where they take the places of
    a lost node's ranks: what copies in memory that node had is lost with it, and none are made here in this attempt."""
    number = rendezvous.job_store.round_number
    ranks = [worker.global_rank for worker in worker_group.workers]
    identities, copies = launching.identities, launching.copies
    by_site = identities is None and launching.secret is not None  # its certificates name no keeper
    sockets = {"TTP_IDENTITY": "", "TTP_COPIES": "", "TTP_RELAY_SOCKET": "", VACANT: vacant}
    if identities is not None:
        sockets["TTP_IDENTITY"] = identities.begin(rendezvous.secret, job_id, number, ranks)
    if launching.relays is not None:
        sockets["TTP_RELAY_SOCKET"] = launching.relays.begin(ranks, worker_group.workers[0].world_size if ranks else 0)
    if copies is not None and not vacant:
        saved = copies.begin(
            job_id,
            number,
            worker_group.store,  # type: ignore[arg-type]  # torch has it None before a rendezvous
            node=worker_group.group_rank or 0,
            nodes=worker_group.group_world_size or 1,
            host="" if by_site else rendezvous.host,
            secret=rendezvous.secret if identities is not None else None,
            ranks=ranks,
        )
        if saved:
            log.warning("%s", saved)
            if launching.reporter is not None:
                launching.reporter.saved_from_copies(number, saved.step, saved.path)
        sockets["TTP_COPIES"] = copies.address
    set_variables(number, start_id, attempt_dir, launching.fork_servers, sockets)
