"""What copies in memory and saves that training does not wait for cost.

1. Bytes a second of a snapshot (what training stops for) against memcpy of the same tensors, and of a transfer to another keeper over the loopback, with
   and without TLS, against plain TCP: in this process, by turns.
2. Step time of two ranks (FSDP2, full shard) with a copy behind every 1st, 4th and 16th step against none: a job each, by turns.
3. What `save(wait=False)` stops training for, against memcpy of the rank's bytes and DCP's `async_save` of the same state in the same job, and the time of
   steps while a save is written: for 50 and 500 MB a rank.

Exit status 1 when a save stops training for more than STALL times a memcpy, or for longer than `async_save`, or steps beside a save take more than BESIDE times
as long (medians).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._snapshot_worker import BATCH, LAYERS
from ttp.checkpoint.format.types import HeldTensor
from ttp.copies import transfer
from ttp.copies.region import Description, Region, places_of, region_bytes
from ttp.identity.authority import Authority
from ttp.identity.role import Identity, Role
from ttp.identity.secret import make_secret

ROOT = Path(__file__).resolve().parents[1]
STALL = 1.2
BESIDE = 1.03
RANKS = 2


def medians(values: Sequence[float], unit: float = 1.0) -> str:
    """Return median and range."""
    ordered = sorted(unit * value for value in values)
    return f"{statistics.median(ordered):8.2f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def region_of(tensors: Sequence[torch.Tensor]) -> Region:
    held = {"group": [HeldTensor(f"t{n}", tuple(t.shape), 0, t) for n, t in enumerate(tensors)]}
    places = (places_of(held),) * 2
    region = Region(memoryview(bytearray(region_bytes(places))))
    region.describe(Description(0, 0, 1, ("group",), places, {}))
    return region


def snapshots(megabytes: int, turns: int) -> None:
    tensors = [torch.randn(megabytes * (1 << 18) // 8) for _ in range(8)]
    region, room = region_of(tensors), [torch.empty_like(values) for values in tensors]
    gigabytes = sum(t.numel() * 4 for t in tensors) / 1e9
    found: dict[str, list[float]] = {"memcpy": [], "snapshot": []}
    for turn in range(turns + 2):  # pages are touched first
        copied = timed(lambda: [into.copy_(values) for into, values in zip(room, tensors, strict=True)])
        written = timed(lambda turn=turn: region.write(turn % 2, turn, turn, b"{}", tensors))
        if turn > 1:
            found["memcpy"].append(gigabytes / copied)
            found["snapshot"].append(gigabytes / written)
    print(f"1. {megabytes} MB, GB/s (medians of {turns})")
    for name, values in found.items():
        print(f"   {name:28} {medians(values)}")
    authority = Authority(make_secret(), "bench")
    credentials = authority.issue(Identity("bench", Role.KEEPER, node="bench"))
    ways: dict[str, list[float]] = {"plain TCP": [], "transfer": [], "transfer with TLS": []}
    for _ in range(max(3, turns // 3)):
        ways["plain TCP"].append(gigabytes / over_loopback(region, None, raw=True))
        ways["transfer"].append(gigabytes / over_loopback(region, None))
        ways["transfer with TLS"].append(gigabytes / over_loopback(region, credentials))
    for name, values in ways.items():
        print(f"   {name:28} {medians(values)}", flush=True)


def over_loopback(region: Region, credentials: Any, *, raw: bool = False) -> float:
    """Send a copy to a receiver in a thread; return the seconds that took."""
    (copy, *_), description = region.copies(), region.description
    assert description is not None
    there = Region(memoryview(bytearray(region_bytes(description.slots))))
    there.describe(description)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take() -> None:
            channel, _ = listener.accept()
            if credentials is not None:
                channel = transfer.context(credentials, server=True).wrap_socket(channel, server_side=True)
            with channel:
                if raw:
                    room = there.data(0)
                    while len(room):
                        room = room[channel.recv_into(room) :]
                    channel.sendall(b"!")
                else:
                    transfer.receive(channel, lambda header, description: there)

        receiver = threading.Thread(target=take)
        receiver.start()
        security = transfer.context(credentials, server=False) if credentials is not None else None
        with transfer.connect(f"127.0.0.1:{listener.getsockname()[1]}", security) as channel:

            def give() -> None:
                if raw:
                    channel.sendall(region.data(copy.slot))
                    channel.recv(1)
                else:
                    transfer.send(channel, region, copy.slot, copy.sequence, 0.0, True)

            took = timed(give)
        receiver.join()
    return took


def job(folder: Path, *words: str, **environ: str) -> dict[str, Any]:
    """Run one job under ttprun; return what its rank 0 has printed."""
    worker = str(Path(__file__).with_name("_snapshot_worker.py"))
    command = [sys.executable, "-m", "ttp.launch", "--nproc-per-node", str(RANKS), worker, words[0], str(folder)]
    done = subprocess.run(
        [*command, *words[1:]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    raise RuntimeError(f"a job has failed:\n{done.stdout}{done.stderr}")


def step_times(turns: int, steps: int) -> None:
    found: dict[int, list[float]] = {0: [], 1: [], 4: [], 16: []}
    nbytes = 0
    for turn in range(turns):
        for every in list(found) if turn % 2 == 0 else list(found)[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                answer = job(Path(folder), "steps", str(every), str(steps))
            found[every].append(statistics.mean(answer["steps_s"]))
            nbytes = answer["nbytes"]
    print(
        f"2. steps of {RANKS} ranks, {nbytes / 1e6:.0f} MB each; host memory for copies {2 * nbytes / 1e6:.0f} MB a rank; means of {turns} jobs, ms"
    )
    plain = statistics.median(found[0])
    for every, values in found.items():
        name = f"a copy every {every} steps" if every else "no copies"
        print(f"   {name:28} {medians(values, 1e3)}   ratio {statistics.median(values) / plain:.3f}", flush=True)


def saves(megabytes: int, turns: int) -> list[str]:
    """`megabytes`: of the state of a rank, about."""
    width = 8 * round(math.sqrt(megabytes * 1e6 * RANKS / (LAYERS * 3 * 4)) / 8)
    batch = max(8, round(BATCH * (1024 / width) ** 2))  # steps of about the same time
    with tempfile.TemporaryDirectory() as folder:
        answer = job(Path(folder), "saves", str(turns), SNAPSHOT_WIDTH=str(width), SNAPSHOT_BATCH=str(batch))
    print(f"3. {RANKS} ranks, {answer['nbytes'] / 1e6:.0f} MB each: training stops for, ms (medians of {turns})")
    middle = {name: statistics.median(values) for name, values in answer["stalls"].items()}
    for name, values in answer["stalls"].items():
        print(f"   {name:28} {medians(values, 1e3)}   ratio to memcpy {middle[name] / middle['memcpy']:.2f}")
    alone, beside = (statistics.median(answer[name]) for name in ("alone_s", "beside_s"))
    print(f"   {'until it is published':28} {medians(answer['written_s'], 1e3)}")
    print(f"   {'a step alone':28} {medians(answer['alone_s'], 1e3)}")
    print(
        f"   {'a step while a save is written':28} {medians(answer['beside_s'], 1e3)}   ratio {beside / alone:.3f}",
        flush=True,
    )
    missed = []
    stall = middle["save(wait=False)"]
    if stall > STALL * middle["memcpy"]:
        missed.append(
            f"{megabytes} MB: a save stops training for {stall / middle['memcpy']:.2f} times a memcpy, limit {STALL}"
        )
    if stall > middle["async_save"]:
        missed.append(
            f"{megabytes} MB: a save stops training for {stall / middle['async_save']:.2f} times async_save's stop, limit 1"
        )
    if beside > BESIDE * alone:
        missed.append(
            f"{megabytes} MB: a step beside a save takes {beside / alone:.3f} times one alone, limit {BESIDE}"
        )
    return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=512, help="of part 1; 0: leave it out")
    parser.add_argument("--saves", type=int, nargs="*", default=[50, 500], help="megabytes a rank of part 3")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=3, help="of each interval, by turns, in part 2; 0: leave it out")
    parser.add_argument("--steps", type=int, default=48, help="that are timed in each job")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.megabytes:
        snapshots(options.megabytes, options.turns)
    if options.jobs:
        step_times(options.jobs, options.steps)
    missed = []
    for megabytes in options.saves:
        missed += saves(megabytes, options.turns if megabytes < 200 else max(3, options.turns // 3))
    for text in missed:
        print(text, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
