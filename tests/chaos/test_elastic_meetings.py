"""An elastic job (`--nnodes 2:3`) whose nodes are lost and come back, restart after restart: each time the right nodes meet, and the training loses nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.chaos.launching import Launch
from tests.ports import free_port
from ttp.launch.rendezvous.multi_endpoint import epoch_key

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"),
    pytest.mark.long,
    pytest.mark.timeout(1200),
]

TRAINS = """
import time
import torch
import torch.distributed as dist
import ttp
from tests.chaos.test_elastic_meetings import SAMPLES, SGD, digest, gradient, weights

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = dist.get_world_size()
model = torch.nn.ParameterDict({"w": weights()})
optimizer_class = ttp.TTPOddReplicaOptimizer if world % 2 else ttp.TTPReplicaOptimizer
optimizer = optimizer_class(model.named_parameters(), torch.optim.SGD, **SGD)
session = ttp.start(optimizer, save_dirs=[str(out / "checkpoints")])
session.resume()
note("pid", os.getpid())
note("begun", world)

@ttp.ttp_to_persist
def train():
    with open(out / f"trace-{rank}-{start}", "w", buffering=1) as trace:
        ends = 0
        while not ends:
            step = optimizer.current_step + 1
            optimizer.zero_grad()
            own = [gradient(model["w"].detach(), step, sample) for sample in range(rank, SAMPLES, world)]
            (model["w"] * sum(own) * world).sum().backward()
            session.set_step_state(step, {})
            ends = optimizer.step(sums=[float(rank == 0 and (out / "end").exists())]).sums[0]
            print(step, digest(model["w"]), file=trace)
            time.sleep(0.05)
    session.save()

train()
session.close()
dist.destroy_process_group()
"""
"""Each rank has its share of a step's samples. All values of a gradient have few bits, so that their sum is exact however it is divided, and the
optimizer multiplies by powers of two only: the bits of the weights do not depend on how many ranks there are, and are wrong if one has a wrong share."""

SAMPLES, WIDTH = 6, 64
SGD: dict[str, Any] = {"lr": 2.0**-6, "momentum": 0.5}


def weights() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(WIDTH, dtype=torch.float32) / 64)


def gradient(weights_W: torch.Tensor, step: int, sample: int) -> torch.Tensor:
    """Return a sample's part of a step's gradient, which depends on the weights too."""
    generator = torch.Generator().manual_seed(step * SAMPLES + sample)
    return (torch.randint(-3, 4, (WIDTH,), generator=generator) + torch.round(weights_W * 8) / 8) / 8


def digest(weights_W: torch.Tensor) -> str:
    return weights_W.detach().numpy().tobytes().hex()


def expected(steps: int) -> list[str]:
    """Return the weights after each step, by torch's own SGD in this process."""
    parameter = weights()
    optimizer, after = torch.optim.SGD([parameter], **SGD), []
    for step in range(1, steps + 1):
        parameter.grad = sum(
            (gradient(parameter.detach(), step, sample) for sample in range(SAMPLES)), torch.zeros(WIDTH)
        )
        optimizer.step()
        after.append(digest(parameter))
    return after


class Job:
    """The job, its nodes 1 to 3, and a store on a machine that does not train, so that any node may be lost."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._port = free_port()
        command = [sys.executable, "-m", "ttp.launch.stores", "--port", str(self._port), "--host", "127.0.0.1"]
        keeper = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(keeper.kill)
        assert keeper.stdout is not None and keeper.stdout.readline()
        self.agents: list[Launch] = []
        self.here: dict[int, Launch] = {}
        """By node, its agent."""

    def start(self, node: int) -> None:
        """Start a node's agent; another one than before, if it was lost."""
        words = [
            *("--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "j"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", f"127.0.0.{node}"),
            *("--rdzv-conf", "is_host=0", "--max-restarts", "20"),
        ]
        environ = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        name = f"node{node}-{len(self.agents)}"
        self.here[node] = self._stack.enter_context(Launch(self.folder, TRAINS, *words, environ=environ, name=name))
        self.agents.append(self.here[node])

    def lose(self, node: int) -> None:
        """Kill all processes of a node at once."""
        agent = self.here.pop(node)
        for pid in (agent.process.pid, *agent.marked()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.process.wait()

    def kill_a_rank(self) -> None:
        """Kill the last rank of the present attempt, on a node that is there."""
        attempt = self.attempts()[-1]
        os.kill(int((self.folder / f"pid-{self.size(attempt) - 1}-{attempt}").read_text()), signal.SIGKILL)

    def node_of_rank_0(self) -> int:
        attempt = self.attempts()[-1]
        return next(
            node for node, agent in self.here.items() if ranks_of(agent).get(attempt) == (0, self.size(attempt))
        )

    def attempts(self) -> list[int]:
        """Return the attempts whose ranks have begun, in order."""
        return sorted({int(path.name.rpartition("-")[2]) for path in self.folder.glob("begun-*")})

    def size(self, attempt: int) -> int:
        """Return of how many ranks an attempt is."""
        (size,) = {path.read_text() for path in self.folder.glob(f"begun-*-{attempt}")}
        return int(size)

    def trace(self, attempt: int) -> dict[int, str]:
        """Return the steps of an attempt with the weights after each, the same on every rank."""
        steps: dict[int, str] = {}
        for path in self.folder.glob(f"trace-*-{attempt}"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # a rank may have been killed as it wrote the last one
                    step, found = line.split()
                    assert steps.setdefault(int(step), found) == found, (attempt, step)
        return steps

    def trains(self, size: int) -> bool:
        """Return whether the last attempt is of so many ranks, and has completed some steps."""
        attempts = self.attempts()
        return bool(attempts) and self.size(attempts[-1]) == size and len(self.trace(attempts[-1])) > 5

    def until_it_trains(self, size: int, after: int = -1) -> None:
        """Wait for an attempt of so many ranks, later than the one with number `after`, to complete some steps."""
        agent = next(iter(self.here.values()))
        try:
            agent.until(
                lambda: self.attempts()[-1:] > [after] and self.trains(size), f"attempt of {size} ranks that trains"
            )
        except AssertionError:
            raise AssertionError("\n".join(f"{each.log.name}:\n{each.text}" for each in self.agents)) from None

    def epoch(self) -> int:
        store = TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False)
        return int(store.get(epoch_key("j")))


def ranks_of(agent: Launch) -> dict[int, tuple[int, int]]:
    """Return an agent's rank in each attempt that it took part in, and of how many."""
    found = re.findall(r"attempt (\d+): rank (\d+) of (\d+) on this node", agent.text)
    assert len({attempt for attempt, _, _ in found}) == len(found), agent.text
    return {int(attempt): (int(rank), int(size)) for attempt, rank, size in found}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(tmp_path, stack)


def test_nodes_are_lost_and_come_back_over_many_restarts(job: Job) -> None:
    """Any node; it comes back at once, while the others meet, or when they train without it, and have lost a rank besides. Every agent that is there has one rank of each attempt, none
    is displaced by one that comes, and each attempt continues with the next step of the trajectory of an uninterrupted job."""
    for node in (1, 2, 3):
        job.start(node)
    job.until_it_trains(3)
    for at_once in (False, True, False):
        lost = job.node_of_rank_0() if at_once else max(set(job.here) - {job.node_of_rank_0()})
        before = job.attempts()[-1]
        job.lose(lost)
        if not at_once:
            job.until_it_trains(2)
            before = job.attempts()[-1]
            job.kill_a_rank()
            job.until_it_trains(2, after=before)
        job.start(lost)
        job.until_it_trains(3, after=before)
    (job.folder / "end").touch()
    texts = "\n".join(f"{agent.log.name}:\n{agent.text}" for agent in job.agents)
    assert [agent.wait() for agent in job.here.values()] == [0, 0, 0], texts

    attempts = job.attempts()
    sizes = [job.size(attempt) for attempt in attempts]
    assert attempts == list(range(len(attempts))), "no attempt was given up before its ranks had begun"
    assert sizes in ([3, 2, 2, 3, 3, 2, 2, 3], [3, 2, 2, 3, 2, 3, 2, 2, 3]), texts
    for attempt, size in zip(attempts, sizes, strict=True):
        ranks = [found[attempt] for agent in job.agents if attempt in (found := ranks_of(agent))]
        assert sorted(ranks) == [(rank, size) for rank in range(size)], f"attempt {attempt}: {ranks}\n{texts}"
    for agent in job.agents:
        took_part = sorted(ranks_of(agent))
        last = attempts[-1] if agent in job.here.values() else took_part[-1]
        assert took_part == list(range(took_part[0], last + 1)), f"{agent.log.name} was displaced\n{texts}"
    assert len(attempts) <= job.epoch() <= 2 * len(attempts) - 1, "an epoch for those that are here, and one for all"

    steps, last_step = [job.trace(attempt) for attempt in attempts], 0
    right = expected(max(steps[-1]))
    for trace in steps:
        # The last step of an attempt may be complete, and saved, before a rank has come to write of it.
        assert last_step < min(trace) <= last_step + 1 + (last_step > 0), texts
        assert sorted(trace) == list(range(min(trace), max(trace) + 1))
        assert [step for step, found in trace.items() if found != right[step - 1]] == []
        last_step = max(trace)
    for agent in job.here.values():
        agent.assert_nothing_left()
