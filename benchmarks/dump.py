"""What a dying gasp costs on this disk: write_share + publish + verify, beside torch.save and stock dcp.save of the same bytes.

For each size and number of writers (processes, as at a fault; each holds its part of the state) and several rounds, in one run:
a plain `torch.save` of its part by each process, with fsync; stock `dcp.save` by all over gloo, with fsync; then the shares written
at once, published and verified. Times are wall time from the moment all processes stand ready; the checkpoints lie in a
temporary folder that is removed. The page cache is warm for `verify`, as it is at the restart after a fault on the same node.

The ratio to dcp.save is what checksums, the table, the manifest and the atomic publish cost. No limit: the disk decides.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.publish import publish
from ttp.checkpoint.verify import verify
from ttp.checkpoint.write import write_share
from ttp.proto.messages import Cause, CauseKind, ShareResult

TENSOR_BYTES = 64 << 20
CAUSE = Cause(CauseKind.EXITED, (1,), "signal SIGKILL")
KINDS = ("torch.save", "dcp.save", "write_share", "publish", "verify")


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

    def torch_save(self, folder: Path) -> None:
        """Every process saves what it holds into a file of its own, and makes it durable."""
        with open(folder / f"rank{self.rank}.pt", "wb") as file:
            torch.save(self.rows, file)
            file.flush()
            os.fsync(file.fileno())

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

    def round(self, folder: Path) -> dict[str, float]:
        took = {}
        took["torch.save"], _ = self.timed(lambda: self.torch_save(folder))
        self._clear(folder)
        took["dcp.save"], _ = self.timed(lambda: self.dcp_save(folder))
        self._clear(folder)
        took["write_share"], mine = self.timed(lambda: self.write_share(folder))
        results: list[Any] = [None] * self.count
        dist.all_gather_object(results, mine)
        took["publish"], _ = self.timed(lambda: self.publish(folder, results))
        took["verify"], _ = self.timed(lambda: self.verify(folder))
        self._clear(folder)
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
    for _ in range(rounds):
        took = bench.round(Path(folder))
        if rank == 0:
            out.put(took)
    dist.destroy_process_group()


def measure(nbytes: int, writers: int, rounds: int, parent: str | None) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(dir=parent) as folder, tempfile.TemporaryDirectory() as aside:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        arguments = (writers, nbytes, rounds, folder, f"{aside}/store", queue)
        mp.spawn(run_writer, args=arguments, nprocs=writers)
        return [queue.get() for _ in range(rounds)]


def show(nbytes: int, writers: int, rounds: list[dict[str, float]]) -> None:
    print(f"{nbytes / 1e9:.2f} GB, {writers} writer{'s' if writers > 1 else ''}, {len(rounds)} rounds")
    gasp = [took["write_share"] + took["publish"] for took in rounds]
    for kind in KINDS:
        values = sorted(took[kind] for took in rounds)
        print(f"  {kind:22} median {statistics.median(values):7.3f} s  ({values[0]:.3f} to {values[-1]:.3f})")
    ratios = {
        kind: statistics.median(g / took[kind] for g, took in zip(gasp, rounds, strict=True)) for kind in KINDS[:2]
    }
    rate = nbytes / 1e9 / statistics.median(gasp)
    print(
        f"  {'write_share + publish':22} median {statistics.median(gasp):7.3f} s  ({min(gasp):.3f} to {max(gasp):.3f}), "
        f"{rate:.2f} GB/s; {ratios['torch.save']:.2f} x torch.save, {ratios['dcp.save']:.2f} x dcp.save",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.25, 1.0], help="sizes of the state")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dir", default=None, help="folder on the disk to measure (default: the system's temporary one)"
    )
    options = parser.parse_args(arguments)
    for gigabytes in options.gb:
        nbytes = int(gigabytes * 1e9)
        free = shutil.disk_usage(options.dir or tempfile.gettempdir()).free
        if free < 3 * nbytes:
            print(f"{gigabytes:g} GB: left out, {free / 1e9:.1f} GB are free, expected {3 * nbytes / 1e9:.1f}")
            continue
        for writers in options.writers:
            show(nbytes, writers, measure(nbytes, writers, options.rounds, options.dir))
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
