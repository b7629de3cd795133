"""A rank that waits on a connection from which gloo reads no more: run by `test_deaf.py` on three real ranks."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttp.groups.process_groups import GROUPS


def main(rank: int, port: int, folder: str) -> None:
    """Rank 2 waits for a sum that rank 0 never enters, behind a message whose memory it has given back; rank 1 does not enter it either."""
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, 4, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        GROUPS.make_again()
        dist.barrier()
        if rank == 1:
            store.wait(["over"])
            os._exit(0)
        if rank == 0:
            store.wait(["waits"])
            dist.isend(torch.ones(1000), 2, tag=7)
            store.set("sent", "")
        else:
            _come_out(store)
            store.set("over", "")
        store.wait(["over"])
        Path(folder, f"done_{rank}").touch()
    except BaseException:
        Path(folder, f"error_{rank}").write_text(traceback.format_exc())
    os._exit(0)


def _come_out(store: Any) -> None:
    raised: list[str] = []
    work = dist.all_reduce(torch.ones(90_000), async_op=True)

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raised.append(str(error))

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    receives = dist.irecv(torch.zeros(1000), 0, tag=7)
    del receives
    gc.collect()
    store.set("waits", "")
    store.wait(["sent"])
    opened = [GROUPS.leave()]
    while waits.is_alive():
        opened.append(GROUPS.leave())
        waits.join(0.02)
    # The last look may come after the connection has gone, and before the thread has ended.
    assert raised and 1 in opened[1:], (raised, opened)
