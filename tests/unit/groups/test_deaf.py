"""gloo reads no more of a connection behind a message whose memory is gone: who waits for another one there comes out all the same."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.unit.forkserver import fork_server, run_ranks_to_end
from tests.unit.groups import deaf

DEADLINE_S = 60.0


def test_a_rank_comes_out_of_a_wait_on_a_connection_that_is_read_no_more(tmp_path: Path) -> None:
    """Neither that it was shut down nor that its peer is gone ends the wait: it lasted for the group's timeout, half an hour."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes = [fork_server().Process(target=deaf.main, args=(rank, store.port, str(tmp_path))) for rank in range(3)]
    run_ranks_to_end(processes, tmp_path, DEADLINE_S, "deaf")
    assert {path.name for path in tmp_path.glob("done_*")} == {"done_0", "done_2"}
