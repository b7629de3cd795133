"""Trainers that ttp.protect protects: a rank dies and the others keep running, with the losses, learning rates and weights of a job without a fault. What cannot
be done in place is named, and costs a checkpoint and a restart."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.tensorboard_files import written

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

STEPS = 24
LOOP = """
import contextlib
import torch
import torch.distributed as dist
import ttp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

options = set(sys.argv[2].split(","))
torch.set_num_threads(1)
ttp.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(8, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(300, 300), torch.nn.Linear(300, 3)
)
view = {"gradient_as_bucket_view": True} if "view" in options else {}
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.2, **view)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
samples = TensorDataset(x, (x.norm(dim=1) > 2.7).long())
sampler = DistributedSampler(samples, shuffle=True, seed=3)
workers = {"num_workers": 1, "persistent_workers": True} if "persistent" in options else {}
loader = DataLoader(samples, batch_size=8, sampler=sampler, drop_last=True, **workers)
MICRO = 2 if "accumulate" in options else 1
schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)]
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled="scaler" in options)
averages = {"ema": torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))}
guard = ttp.protect(
    net if "within" in options else model, optimizer, schedulers=schedules, averages=averages, state={"scaler": scaler} if "scaler" in options else {},
    save_dirs=[str(out / "checkpoints")], clip=ttp.ClipNorm(1.0) if "clip" in options else None,
    save_interval=4 if "save" in options else 0, save_wait="quick" not in options,
    tensorboard=out / "board" if "board" in options else None,
)
for group in optimizer.param_groups:
    group["weight_decay"] = 0.2
if "hook" in options:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    model.register_comm_hook(None, allreduce_hook)

def line(step, loss):
    with open(out / f"losses-{rank}", "a") as file:
        file.write(f"{step} {os.getpid()} {loss.item().hex()} {optimizer.param_groups[0]['lr'].hex()} {optimizer.param_groups[0]['weight_decay']}\\n")

def die_once(where):
    if where in options and rank == 1 and not (out / "died").exists():
        (out / "died").touch()
        if "raises" in options:
            raise RuntimeError("once")
        os.kill(os.getpid(), signal.SIGKILL)

def evaluate():
    with guard.pause(), torch.no_grad():
        model.eval()
        torch.randn(3)
        if "called in it" in options:
            model(x[:4])
        (out / f"evaluates-{rank}").touch()
        await_file("evaluates-0")
        die_once("dies in an evaluation")
        dist.all_reduce(torch.ones(3))
        model.train()

frozen = []

@ttp.ttp_to_persist
def train():
    for epoch in guard.epochs(3):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in guard.enumerate(loader):
            COUNTED
            if "freezes" in options and guard.step >= 9 and not frozen:
                frozen.append(net[1].eval())
            last = (index + 1) % MICRO == 0
            if index % MICRO == 0:
                optimizer.zero_grad()
            if "no_sync" not in options:
                model.require_backward_grad_sync = last
            with model.no_sync() if "no_sync" in options and not last else contextlib.nullcontext():
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            if not last and guard.step == 8:
                die_once("dies within a step")
            if "two die" in options and guard.step == 8 and rank < 2 and not (out / f"dies-{rank}").exists():
                (out / f"dies-{rank}").touch()
                await_file(f"dies-{1 - rank}")
                os.kill(os.getpid(), signal.SIGKILL)
            scaler.scale(loss).backward()
            if not last:
                continue
            scaler.step(optimizer)
            scaler.update()
            schedules[0].step()
            guard.session.report_loss(loss.item())
            line(guard.step, loss)
            if "evaluation" in options and guard.step % 5 == 0:
                evaluate()
    guard.save()

train()
weights = torch.cat([value.double().view(-1) for each in (net, *averages.values()) for value in each.state_dict().values()])
note("final", f"{weights.norm().item().hex()} {guard.step} {scaler.get_scale()}")
guard.close()
dist.destroy_process_group()
"""

LOOP, COUNTS = (
    LOOP.replace("COUNTED", ""),
    LOOP.replace("COUNTED", "index = counted[0]")
    .replace("@ttp.ttp_to", "counted = [0]\n@ttp.ttp_to")
    .replace("if not last:", "counted[0] += 1\n            if not last:"),
)
"""The second counts its micro-steps outside of train."""

Job = Callable[..., "Ended"]
During = Callable[[Launch], None]


class Ended:
    """A job that has ended well: what it said, and what its ranks noted."""

    def __init__(
        self, out: Path, ranks: int, options: str, faults: str, script: str, during: During | None = None
    ) -> None:
        out.mkdir()
        environ = {"TTP_FAULTS": faults, "TTP_IN_PLACE": "unrehearsed", "TTP_IN_PLACE_S": "30"}  # a loaded machine
        if "rehearses" in options:
            environ["TTP_REHEARSE"] = "every:3"
        with Launch(out, script, "--nproc-per-node", str(ranks), environ=environ, arguments=(options,)) as job:
            if during is not None:
                during(job)
            assert job.wait() == 0, job.text
            self.text = job.text
            finals = job.notes("final")
            self.attempts = {name.rsplit("-", 1)[1] for name in finals}
            self.finals = [job.read(name) for name in finals]
            job.assert_nothing_left()
        self.lines = [
            [line.split() for line in (out / f"losses-{rank}").read_text().splitlines()] for rank in range(ranks)
        ]
        self.journals = "".join(path.read_text() for path in (out / "checkpoints" / "ttp_log").glob("journal_*.jsonl"))
        self.stacks = "".join(path.read_text() for path in (out / "checkpoints" / "ttp_log").glob("rank_*/stacks.log"))
        """Of ranks that had not regrouped as a recovery in place was given up."""
        self.board = written(out / "board") if "board" in options else Counter[tuple[str, int]]()
        """How often each point of TensorBoard was written."""
        self.checkpoints = sorted(path.name for path in (out / "checkpoints").glob("iter_*"))

    def steps(self, rank: int) -> dict[str, set[tuple[str, ...]]]:
        """Return what the rank noted of each step, in all its processes."""
        found: dict[str, set[tuple[str, ...]]] = {}
        for step, _, *rest in self.lines[rank]:
            found.setdefault(step, set()).add(tuple(rest))
        return found

    def pids(self, rank: int) -> int:
        return len({line[1] for line in self.lines[rank]})


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a function that runs a job to its end; those without faults once a session."""
    done: dict[tuple[int, str, str], Ended] = {}

    def run(ranks: int, options: str = "", faults: str = "", script: str = LOOP) -> Ended:
        if faults or "dies" in options:
            return Ended(tmp_path_factory.mktemp("job") / "job", ranks, options, faults, script)
        key = ranks, options, script
        if key not in done:
            done[key] = Ended(tmp_path_factory.mktemp("whole") / "job", ranks, options, "", script)
        return done[key]

    return run


def assert_equal(job: Ended, whole: Ended, ranks: int) -> None:
    """Every step of every rank has the baseline's numbers, however often it was computed, and the final weights do."""
    assert sorted(job.finals) == sorted(whole.finals) and len(job.finals) == ranks
    for rank in range(ranks):
        expected, got = whole.steps(rank), job.steps(rank)
        missing = set(expected) - set(got)
        assert len(missing) <= 1 + job.text.count("training continues after step"), (
            "a step that was in flight at a fault has no line"
        )
        assert {step: expected[step] for step in got} == got


def assert_in_place(job: Ended, victims: tuple[int, ...], ranks: int, times: int = 1) -> None:
    assert len(re.findall("training continues after step", job.text)) == times, job.text[-4000:] + job.stacks
    assert job.attempts == {"0"} and "restarting" not in job.text
    for rank in range(ranks):
        assert job.pids(rank) == 1 + victims.count(rank), f"processes of rank {rank}"


def test_a_killed_rank_of_ddp_is_replaced(ended: Job) -> None:
    """With batch norm, dropout, averages, a schedule that recurs, gradients that are accumulated, and settings that were changed behind ttp.protect."""
    job = ended(2, "accumulate,save", "kill:rank=0,step=9,point=record")
    assert_in_place(job, (0,), 2)
    assert_equal(job, ended(2, "accumulate,save"), 2)
    assert job.checkpoints == ended(2, "accumulate,save").checkpoints


@pytest.mark.long
def test_a_survivor_that_does_not_come_out_of_its_step_costs_a_restart_and_says_where_it_stands(ended: Job) -> None:
    """One thread does not return to Python, as in a collective that no closed connection ends; the others wait for that rank in the new groups."""
    job = ended(3, "", "kill:rank=1,step=9,point=backward;hang:rank=2,step=9,point=backward")
    assert job.attempts == {"1"} and "had not regrouped after 30 s" in job.journals and "lost    0 steps" in job.text
    given_up = "the regroup of freeze 1 was given up before this rank had done it"
    assert job.stacks.count(given_up) == 3 and "in make_again" in job.stacks and "faults/inject.py" in job.stacks, (
        job.stacks
    )


@pytest.mark.long
@pytest.mark.parametrize("point", ["backward", "ready", "record", "updating", "done"])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (3, 0), (4, 2)])
def test_a_death_at_every_point_of_a_step(ended: Job, ranks: int, victim: int, point: str) -> None:
    """On three ranks and more a sum's last bit depends on how DDP has the gradients in buckets."""
    job = ended(ranks, "", f"kill:rank={victim},step=9,point={point}")
    assert_in_place(job, (victim,), ranks)
    assert_equal(job, ended(ranks), ranks)


@pytest.mark.long
@pytest.mark.parametrize("options", ["clip", "view", "accumulate,clip", "save", "evaluation", "scaler"])
@pytest.mark.parametrize("point", ["backward", "done"])
def test_a_loops_parts_are_as_they_were(ended: Job, options: str, point: str) -> None:
    job = ended(3, options, f"kill:rank=1,step=13,point={point}")
    assert_in_place(job, (1,), 3)
    assert_equal(job, ended(3, options), 3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("victim", "point"), [(1, "record"), (0, "done")])
def test_no_step_is_in_tensorboard_twice(ended: Job, victim: int, point: str) -> None:
    """Rank 0 writes it: where it keeps its process no step is missing, also one that its work thread finishes; one that is killed has not written its newest."""
    job = ended(2, "board", f"kill:rank={victim},step=9,point={point}")
    assert_in_place(job, (victim,), 2)
    steps = {step for name, step in job.board if name == "train/learning_rate"}
    expected = set(range(1, int(job.finals[0].split()[1]) + 1))
    assert set(job.board.values()) == {1}, job.board
    assert steps == expected if victim else steps >= expected - set(range(1, 10)), (
        sorted(expected - steps),
        sorted(steps),
    )


@pytest.mark.long
def test_several_deaths_one_after_the_other_and_at_once(ended: Job) -> None:
    job = ended(3, "two die", "kill:rank=2,step=15,point=ready")
    assert_in_place(job, (0, 1, 2), 3, times=2)
    assert_equal(job, ended(3), 3)


@pytest.mark.long
def test_an_evaluation_in_which_a_rank_dies_leaves_nothing(ended: Job) -> None:
    """Of the ranks that stay: the model in evaluation mode, random numbers that were drawn."""
    job = ended(2, "evaluation,dies in an evaluation")
    assert_in_place(job, (1,), 2)
    assert_equal(job, ended(2, "evaluation"), 2)


@pytest.mark.long
@pytest.mark.parametrize("options", ["accumulate,no_sync", "accumulate,no_sync,raises", "accumulate,raises"])
def test_a_pass_without_synchronization_leaves_it_on(ended: Job, options: str) -> None:
    """Its flags of DDP, which differ from a new process's: without them gradients are never reduced again, or one rank waits for buffers."""
    job = ended(2, f"{options},dies within a step")
    assert_in_place(job, () if "raises" in options else (1,), 2)
    assert_equal(job, ended(2, options), 2)


@pytest.mark.long
def test_a_module_that_is_frozen_late_stays_so(ended: Job) -> None:
    job = ended(2, "freezes", "kill:rank=1,step=13,point=backward")
    assert_in_place(job, (1,), 2)
    assert_equal(job, ended(2, "freezes"), 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "times"), [("accumulate,no_sync,freezes", 8), ("evaluation,called in it", 16), ("within", 16)]
)
def test_rehearsals_leave_everything_as_it_was(ended: Job, options: str, times: int) -> None:
    job = ended(2, f"{options},rehearses")
    assert f"train() was exited and entered again {times} times, with equal results" in job.text
    assert_equal(job, ended(2, options), 2)


@pytest.mark.long
def test_an_evaluation_by_the_wrapper_leaves_its_buffers_sent(ended: Job) -> None:
    job = ended(2, "evaluation,called in it,dies in an evaluation")
    assert_in_place(job, (1,), 2)
    assert_equal(job, ended(2, "evaluation,called in it"), 2)


@pytest.mark.long
def test_a_periodic_save_in_which_a_rank_dies_is_made_again(ended: Job) -> None:
    whole = ended(2, "save")
    job = ended(2, "save", "kill:rank=1,step=8,point=write,call=1")
    assert_in_place(job, (1,), 2)
    assert_equal(job, whole, 2)
    assert job.checkpoints == whole.checkpoints


@pytest.mark.long
def test_a_new_process_that_has_made_no_step_of_its_own_leaves_the_checkpoint_and_a_restart(ended: Job) -> None:
    """What its program has set is in no step's state yet."""
    job = ended(2, "accumulate,save", "kill:rank=1,step=9,point=backward;kill:rank=0,step=9,point=ready")
    assert len(re.findall("training continues after step", job.text)) == 1 and job.attempts == {"1"}
    assert "it has not finished a step of its own yet" in job.journals and "no step lost" in job.text
    assert_equal(job, ended(2, "accumulate,save"), 2)


@pytest.mark.long
def test_a_rank_that_dies_within_a_step_of_several_passes(ended: Job) -> None:
    job = ended(2, "accumulate,save,dies within a step")
    assert_in_place(job, (1,), 2)
    assert_equal(job, ended(2, "accumulate,save"), 2)


@pytest.mark.long
def test_a_loop_that_counts_outside_of_train_is_restarted(ended: Job) -> None:
    """The rank that stays would make one pass for the step and the new one two. A restart begins the count anew on both."""
    job = ended(2, "accumulate,dies within a step", script=COUNTS)
    assert "forward passes on ranks 0 to 1 after a recovery in place" in job.text
    assert job.attempts == {"1"} and "no step lost" in job.text
    assert_equal(job, ended(2, "accumulate"), 2)


SHARDED = """
import torch
import torch.distributed as dist
import ttp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

options = set(sys.argv[2].split(","))
torch.set_num_threads(1)
(dist if "joins by itself" in options else ttp).init_process_group("gloo")
torch.manual_seed(0)
world = dist.get_world_size()
shape = (1, world) if "plain" in options else (2, world // 2)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.LayerNorm(64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
mixed = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)} if "mixed" in options else {}
for layer in model:
    if not isinstance(layer, torch.nn.Dropout):
        fully_shard(layer, mesh=mesh, **mixed)
fully_shard(model, mesh=mesh, **mixed)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
MICRO = 2 if "accumulate" in options else 1
guard = ttp.protect(
    model, optimizer, schedulers=[schedule], save_dirs=[str(out / "checkpoints")],
    clip=ttp.ClipNorm(1.0) if "clip" in options else None,
)

@ttp.ttp_to_persist
def train():
    for step in range(guard.step + 1, 25):
        optimizer.zero_grad()
        for micro in range(MICRO):
            model.set_requires_gradient_sync(micro == MICRO - 1)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * micro + 100 * rank + step))
            loss = torch.nn.functional.cross_entropy(model(x).float(), (x.norm(dim=1) > 2.7).long())
            loss.backward()
        optimizer.step()
        schedule.step()
        with open(out / f"losses-{rank}", "a") as file:
            file.write(f"{step} {os.getpid()} {loss.item().hex()} {optimizer.param_groups[0]['lr'].hex()}\\n")
    guard.save()

train()
note("final", sum(p.to_local().double().sum() for p in model.parameters()).item().hex())
guard.close()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("point", ["backward", "ready", "record", "updating", "done"])
@pytest.mark.parametrize(("options", "victim"), [("", 1), ("clip,accumulate", 2), ("mixed,accumulate", 0)])
def test_fsdp2_with_replicas(ended: Job, options: str, victim: int, point: str) -> None:
    job = ended(4, options, f"kill:rank={victim},step=9,point={point}", SHARDED)
    assert_in_place(job, (victim,), 4)
    assert_equal(job, ended(4, options, script=SHARDED), 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("quick,save", "restart: save_wait=False"),
        ("within", "restart from now on: ttp.protect was given the model within DistributedDataParallel"),
        ("hook", "restart from now on: DistributedDataParallel with a communication hook"),
        ("persistent", "restart from now on: a loader's workers are persistent"),
    ],
)
def test_what_a_loop_has_that_cannot_be_done_is_said(ended: Job, options: str, why: str) -> None:
    job = ended(2, options, "kill:rank=1,step=9,point=backward")
    assert f"a rank that dies costs a checkpoint and a {why}" in job.text
    assert job.attempts == {"1"} and "no step lost" in job.text
    assert_equal(job, ended(2, options), 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("plain", "no other rank holds the same as ranks 0-1"),
        ("joins by itself", "the program has joined by torch.distributed.init_process_group"),
    ],
)
def test_what_cannot_be_done_is_said_at_the_start(ended: Job, options: str, why: str) -> None:
    job = ended(2, options, "raise:rank=1,step=9,point=backward", SHARDED)
    assert f"a rank that dies costs a checkpoint and a restart: {why}" in job.text
    assert job.attempts == {"1"} and "no step lost" in job.text
    assert_equal(job, ended(2, options, script=SHARDED), 2)


DATA_OUTSIDE = """
import torch
import torch.distributed as dist
import ttp

torch.set_num_threads(1)
ttp.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
guard = ttp.protect(model, optimizer, on_data_mismatch=sys.argv[2], save_dirs=[str(out / "checkpoints")])
batches = iter([torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(guard.step, 60)])

@ttp.ttp_to_persist
def train():
    for step in range(guard.step + 1, 13):
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        with open(out / f"losses-{rank}", "a") as file:
            file.write(f"{step} {os.getpid()} {loss.item().hex()}\\n")
    guard.save()

train()
note("final", sum(p.double().sum() for p in model.parameters()).item().hex())
guard.close()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_data_from_outside_of_train_ends_in_a_restart_which_has_it(ended: Job) -> None:
    """The iterator has gone on. In a restart that would be the job's end."""
    job = ended(2, "error", "kill:rank=1,step=7,point=backward", DATA_OUTSIDE)
    assert "NotAsBefore" in job.text and job.attempts == {"1"} and "no step lost" in job.text
    assert_equal(job, ended(2, "error", script=DATA_OUTSIDE), 2)


@pytest.mark.long
def test_data_from_outside_of_train_is_warned_of_where_that_was_asked_for(ended: Job) -> None:
    """The rank that stays trains on what its iterator has next."""
    job = ended(2, "warn", "kill:rank=1,step=7,point=backward", DATA_OUTSIDE)
    assert_in_place(job, (1,), 2)
    assert "another batch in step 7 on rank 0" in job.text and job.finals[0] == job.finals[1]
    assert [line[0] for line in job.lines[0]] == [str(step) for step in range(1, 13)]
