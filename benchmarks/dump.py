"""What a dying gasp costs on this disk: write_share + publish beside stock dcp.save of the same bytes, and verify beside SHA-256.

For each size and number of writers (processes, as at a fault; each holds its part of the state) and several rounds, in one run: stock `dcp.save` by all
over gloo, with fsync; and the shares written at once, published and verified; by turns, each first in every other round. Times are wall time
from the moment all processes are ready; the checkpoints are in a temporary folder that is removed. The page cache is warm for
`verify`, as it is at the restart after a fault on the same node; beside it, the same files are read and hashed as before xxh3-128.

Medians and quartiles over the rounds, of the times and of each round's ratio. Exit status 1 when the median ratio to dcp.save is above LIMIT, or
that of the two verifications above VERIFY_LIMIT. Use it on a machine that does nothing else: the load is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from ttp.checkpoint.format.checksum import SHA256, Checksum, of_file
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.publish import publish
from ttp.checkpoint.verify import share_of_files, verify
from ttp.checkpoint.write import write_share
from ttp.proto.messages import Cause, CauseKind, ShareResult

LIMIT = 1.1
VERIFY_LIMIT = 1 / 3
QUICK_GB = 0.01
TENSOR_BYTES = 64 << 20
CAUSE = Cause(CauseKind.EXITED, (1,), "signal SIGKILL")
KINDS = ("dcp.save", "write_share", "publish", "verify", "verify by SHA-256")


def shapes_of(nbytes: int) -> dict[str, tuple[int, int]]:
    """Return the tensors of a state of about so many bytes: FP32, 64 MiB each, as large layers have."""
    count = max(1, nbytes // TENSOR_BYTES)
    return {f"model.layers.{i}.weight": (nbytes // count // 4 // 4096, 4096) for i in range(count)}


class Writer:
    """One of `count` processes: it holds rows [rank / count, (rank + 1) / count) of every tensor."""

    def __init__(self, rank: int, count: int, nbytes: int) -> None:
        self.rank, self.count = rank, count
        self.shapes = shapes_of(nbytes)
        generator = torch.Generator().manual_seed(rank)
        self.rows = {
            key: torch.randn((rows * (rank + 1) // count - rows * rank // count, width), generator=generator)
            for key, (rows, width) in self.shapes.items()
        }

    def held(self) -> list[HeldTensor]:
        return [
            HeldTensor(key, shape, shape[0] * self.rank // self.count * shape[1], self.rows[key].view(-1))
            for key, shape in self.shapes.items()
        ]

    def timed(self, work: Callable[[], object]) -> tuple[float, Any]:
        """Return seconds until every process has done it, and this one's result."""
        dist.barrier()
        began = time.perf_counter()
        result = work()
        dist.barrier()
        return time.perf_counter() - began, result

    def dcp_save(self, folder: Path) -> None:
        state = {f"{key}.{self.rank}": rows for key, rows in self.rows.items()}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "stock", sync_files=True))

    def write_share(self, folder: Path) -> ShareResult:
        return write_share(folder, "iter_0000042_tmp_bench", self.rank, self.held(), {})

    def publish(self, folder: Path, results: list[ShareResult]) -> None:
        if self.rank == 0:
            publish(
                folder, "iter_0000042_tmp_bench", step=42, results=results, cause=CAUSE, record=None, state={"trainer": {}, "optimizer": {"param_groups": []}}, layout={},
                expected=self.shapes,
            )  # fmt: skip

    def verify(self, folder: Path) -> None:
        verify(folder / "iter_0000042", share=(self.rank, self.count))

    def verify_by_sha256(self, folder: Path) -> None:
        """Do what `verify` did before: the cheap checks, then SHA-256 of this process's share of the files."""
        manifest = verify(folder / "iter_0000042", share=(self.rank, self.count), deep=False)
        for file in share_of_files(manifest.files, self.rank, self.count):
            of_file(folder / "iter_0000042" / file.name, Checksum(SHA256))

    def round(self, folder: Path, number: int) -> dict[str, float]:
        took: dict[str, float] = {}
        contenders = [self._stock, self._ours]
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            took |= contender(folder)
            self._clear(folder)
        return took

    def _stock(self, folder: Path) -> dict[str, float]:
        return {"dcp.save": self.timed(lambda: self.dcp_save(folder))[0]}

    def _ours(self, folder: Path) -> dict[str, float]:
        took = {}
        took["write_share"], mine = self.timed(lambda: self.write_share(folder))
        results: list[Any] = [None] * self.count
        dist.all_gather_object(results, mine)
        took["publish"], _ = self.timed(lambda: self.publish(folder, results))
        took["verify"], _ = self.timed(lambda: self.verify(folder))
        took["verify by SHA-256"], _ = self.timed(lambda: self.verify_by_sha256(folder))
        return took

    def _clear(self, folder: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()  # the next one must not wait for this one's blocks
        dist.barrier()


def run_writer(rank: int, count: int, nbytes: int, rounds: int, folder: str, store: str, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    bench = Writer(rank, count, nbytes)
    for number in range(rounds):
        took = bench.round(Path(folder), number)
        if rank == 0:
            out.put(took)
    dist.destroy_process_group()


def measure(nbytes: int, writers: int, rounds: int, parent: str | None) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(dir=parent) as folder, tempfile.TemporaryDirectory() as aside:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        arguments = (writers, nbytes, rounds, folder, f"{aside}/store", queue)
        mp.spawn(run_writer, args=arguments, nprocs=writers)
        return [queue.get() for _ in range(rounds)]


def show(nbytes: int, writers: int, rounds: Sequence[dict[str, float]]) -> bool:
    """Print the figures; return whether both limits were kept."""
    load = os.getloadavg()[0]
    print(f"{nbytes / 1e9:g} GB, {writers} writer{'s' if writers > 1 else ''}, {len(rounds)} rounds, load {load:.1f}")
    dump = [took["write_share"] + took["publish"] for took in rounds]
    for kind in KINDS:
        print(f"  {kind:22} {spread([took[kind] for took in rounds])} s")
    rate = nbytes / 1e9 / statistics.median(dump)
    print(f"  {'write_share + publish':22} {spread(dump)} s, {rate:.2f} GB/s")
    ratio = [mine / took["dcp.save"] for mine, took in zip(dump, rounds, strict=True)]
    verified = [took["verify"] / took["verify by SHA-256"] for took in rounds]
    return all([judged("x dcp.save", ratio, LIMIT), judged("x SHA-256", verified, VERIFY_LIMIT)])


def judged(name: str, ratios: Sequence[float], limit: float) -> bool:
    """Print ratios; return whether their median keeps the limit."""
    kept = statistics.median(ratios) <= limit
    print(f"  {name:22} {spread(ratios)}, limit {limit:.2f}{'' if kept else ': MISSED'}", flush=True)
    return kept


def spread(values: Sequence[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"median {median:7.3f}  ({low:.3f} to {high:.3f})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.25, 1.0, 4.0], help="sizes of the state")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--dir", default=None, help="folder on the disk to measure (default: the system's temporary one)"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"one round of {QUICK_GB} GB by one writer: too little to judge"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.gb, options.writers, options.rounds = [QUICK_GB], [1], 1
    kept = True
    for gigabytes in options.gb:
        nbytes = int(gigabytes * 1e9)
        free = shutil.disk_usage(options.dir or tempfile.gettempdir()).free
        if free < 3 * nbytes:
            print(f"{gigabytes:g} GB: left out, {free / 1e9:.1f} GB are free, expected {3 * nbytes / 1e9:.1f}")
            continue
        for writers in options.writers:
            kept &= show(nbytes, writers, measure(nbytes, writers, options.rounds, options.dir))
    return 0 if kept or options.quick else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
