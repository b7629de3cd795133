"""A replica's memory is altered under the MindIO facade: with `on_divergence="stop"` the job ends in front of the trainer's good checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.ports import free_port

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]

TRAINER = """
import torch
import ttp.mindio as ttp
from ttp.mindio.modellink import TTPOddReplicaOptimizer, build_optimizer_replica_group, get_dp_rank_list

os.chdir(out)
choice, alters, every = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
TRACKER = out / "latest_checkpointed_iteration.txt"
torch.set_num_threads(1)

def save(save_rank, step, rank_list, args):
    optimizer.set_dump_args(save_rank, step, rank_list)
    write(step)

def write(step):
    if optimizer.need_write_file():
        torch.save([model.state_dict(), optimizer.state_dict()], f"iter_{step:07d}_tmp")

def rename(args):
    (out / f"iter_{args[0]:07d}_tmp").rename(out / f"iter_{args[0]:07d}")
    TRACKER.write_text(str(args[0]))
    return 0

@ttp.ttp_to_persist
def train(rank, world_size, dp_ranks):
    if rank == 0:
        ttp.ttp_init_controller(rank, world_size)
        ttp.ttp_start_controller("127.0.0.1", 8000)
    ttp.ttp_init_processor(rank, dp_ranks, len(dp_ranks), world_size)
    ttp.ttp_start_processor("127.0.0.1", 8000)
    ttp.ttp_register_save_ckpt_handler(save)
    ttp.ttp_register_rename_handler(rename)
    for iteration in range(optimizer.current_step + 1, 31):
        optimizer.zero_grad()
        model(torch.full((4, 8), iteration + rank / 10)).square().mean().backward()
        optimizer.step()
        ttp.ttp_set_ckpt_args((iteration, model, optimizer))
        if (rank, iteration) == (1, alters) and not (out / "altered").exists():
            (out / "altered").touch()
            target = next(tensor for held in optimizer.core.holdings().values() for tensor in held if tensor.key.endswith(".exp_avg"))
            target.values[:1].view(torch.int32).bitwise_xor_(1 << 20)
        if iteration % 10 == 0:
            write(iteration)
            torch.distributed.barrier()
            if rank == 0:
                rename((iteration,))
    note("step", optimizer.current_step)

torch.distributed.init_process_group("gloo")
build_optimizer_replica_group(list(range(torch.distributed.get_world_size())))
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
adam = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = TTPOddReplicaOptimizer(adam, 1.0, False, False, False, False, False, torch.float32, None, model, on_divergence=choice)
optimizer.compare_every = every
if TRACKER.exists():
    weights, state = torch.load(f"iter_{int(TRACKER.read_text()):07d}")
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
train(torch.distributed.get_rank(), torch.distributed.get_world_size(), get_dp_rank_list())
"""


def run(out: Path, ranks: int, *arguments: str, name: str = "launcher") -> tuple[int, str]:
    environ = {"TTP_CONTROLLER_PORT": str(free_port()), "TTP_MINDIO_DIR": str(out / "mindio")}
    options = ("--nproc-per-node", str(ranks), "--max-restarts", "2")
    with Launch(out, TRAINER, *options, environ=environ, arguments=arguments, name=name) as launch:
        status = launch.wait()
        launch.assert_nothing_left()
        return status, launch.text


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("iter_*"))


@pytest.mark.parametrize(
    ("ranks", "every", "found"), [(2, 5, 15), (3, 5, 15), (2, 0, 20)], ids=["even", "odd", "before a checkpoint"]
)
def test_replicas_that_differ_stop_the_job_before_the_trainers_checkpoint(
    tmp_path: Path, ranks: int, every: int, found: int
) -> None:
    """By `zero_grad`, and by `need_write_file` before the file is written. Started again, it resumes from the newest checkpoint."""
    status, text = run(tmp_path, ranks, "stop", "13", str(every))
    assert status == 1 and saved(tmp_path) == ["iter_0000010"], text
    assert re.search(
        rf"ReplicasDiffer: step {found}: .* expected equal bits. No checkpoint of this state is written. Resume from the trainer's newest checkpoint of step 10 or before",
        text,
    ), text
    assert "not restarting" in text and not re.search(r"restarting \(\d of", text), text
    status, text = run(tmp_path, ranks, "stop", "13", str(every), name="again")
    assert status == 0 and saved(tmp_path) == ["iter_0000010", "iter_0000020", "iter_0000030"], text


def test_a_difference_that_is_reported_is_a_warning(tmp_path: Path) -> None:
    status, text = run(tmp_path, 2, "report", "13", "5")
    assert status == 0 and text.count("replicas differ in") == 1 and len(saved(tmp_path)) == 3, text
