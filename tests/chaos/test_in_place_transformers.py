"""`transformers.Trainer` under `TTPCallback.train`: a rank dies and the others keep running, with the losses, rates and weights of a job without a fault."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.launching import Launch

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]

SCRIPT = """
import random
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ttp
from ttp.adopt.transformers_callback import TTPCallback

options = set(sys.argv[2].split(","))
torch.set_num_threads(1)
ttp.init_process_group("gloo")
count = 96 * dist.get_world_size()
samples = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))]

class Note(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        if "grad_norm" in logs or "eval_loss" in logs:
            numbers = " ".join(f"{name} {float(value).hex()}" for name, value in sorted(logs.items()) if name in ("loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen"))
            with open(out / f"lines-{rank}", "a") as file:
                file.write(f"{state.global_step} {os.getpid()} {numbers}\\n")

    def on_substep_end(self, args, state, control, **more):
        if "dies within a step" in options and rank == 1 and state.global_step == 8 and not (out / "died").exists():
            (out / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

def collate(rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch["input_ids"] = torch.where(torch.rand(batch["input_ids"].shape) < 0.1, 0, batch["input_ids"])
    return batch

settings = TrainingArguments(
    output_dir=str(out / "trainer"), max_steps=16, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3, logging_steps=1,
    lr_scheduler_type="reduce_lr_on_plateau" if "plateau" in options else "cosine", warmup_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=3,
    eval_strategy="steps" if "evaluation" in options or "plateau" in options else "no", eval_steps=4,
    include_num_input_tokens_seen="all" if "evaluation" in options else "no",
    **({"neftune_noise_alpha": 5.0} if "noise" in options else {}),
)
torch.manual_seed(0)
sizes = dict(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes))
protection = TTPCallback(save_dirs=[str(out / "checkpoints")], in_place=True)
trainer = Trainer(model=model, args=settings, train_dataset=samples, eval_dataset=samples[:16], data_collator=collate, callbacks=[Note(), protection])
protection.train(trainer)
note("final", torch.cat([value.double().view(-1) for value in model.parameters()]).norm().item().hex())
protection.close()
dist.destroy_process_group()
"""

PRELOADED = "transformers.trainer,transformers.models.gpt2.modeling_gpt2,datasets,ttp.adopt.transformers_callback"
"""Else the fork server imports them after the first step, for seconds, and a rank that dies meanwhile costs a restart."""

Job = Callable[..., "Ended"]


class Ended:
    """A job that has ended well: what it printed, and what its ranks noted of each step."""

    def __init__(self, out: Path, ranks: int, options: str, faults: str, every: str) -> None:
        out.mkdir()
        environ = {"TTP_FAULTS": faults, "TTP_IN_PLACE": "unrehearsed", "TTP_IN_PLACE_S": "30", "TTP_REHEARSE": every}
        given = ("--nproc-per-node", str(ranks), "--preload", PRELOADED)
        with Launch(out, SCRIPT, *given, environ=environ, arguments=(options,)) as job:
            assert job.wait() == 0, job.text
            self.text = job.text
            self.finals = sorted(job.read(name) for name in job.notes("final"))
            job.assert_nothing_left()
        rows = [
            [line.split(maxsplit=2) for line in (out / f"lines-{rank}").read_text().splitlines()]
            for rank in range(ranks)
        ]
        self.pids = [{pid for _, pid, _ in each} for each in rows]
        self.lines = [{(step, rest) for step, _, rest in each} for each in rows]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a function that runs a job to its end; those without faults once."""
    done: dict[tuple[int, str], Ended] = {}

    def run(ranks: int, options: str = "", faults: str = "", every: str = "") -> Ended:
        out = tmp_path_factory.mktemp("job") / "job"
        if faults or every or "dies" in options:
            return Ended(out, ranks, options, faults, every)
        if (ranks, options) not in done:
            done[ranks, options] = Ended(out, ranks, options, "", "")
        return done[ranks, options]

    return run


def assert_equal(job: Ended, whole: Ended) -> None:
    """Each line is one of the baseline's; a step in flight at a fault may have none."""
    assert job.finals == whole.finals and len(set(whole.finals)) == 1
    for got, expected in zip(job.lines, whole.lines, strict=True):
        assert got <= expected and len(expected - got) <= job.text.count("training continues after step")


@pytest.mark.parametrize(
    ("ranks", "victim", "step", "point"),
    [
        (2, 1, 9, "backward"),
        (2, 0, 9, "updating"),
        (2, 1, 12, "done"),  # the epoch's last step
        (3, 2, 13, "ready"),
        (3, 0, 6, "record"),
    ],
)
def test_a_killed_rank_is_replaced(ended: Job, ranks: int, victim: int, step: int, point: str) -> None:
    """Also on three ranks, where a sum's last bit depends on how DDP has the gradients in buckets."""
    job = ended(ranks, "", f"kill:rank={victim},step={step},point={point}")
    assert len(re.findall("training continues after step", job.text)) == 1 and "restarting" not in job.text, job.text
    assert [len(pids) for pids in job.pids] == [1 + (rank == victim) for rank in range(ranks)]
    assert_equal(job, ended(ranks))


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ("evaluation", "kill:rank=1,step=9,point=backward;kill:rank=0,step=13,point=ready"),
        ("plateau", "kill:rank=1,step=9,point=backward"),
        ("", "raise:rank=1,step=9,point=backward"),
    ],
)
def test_evaluations_schedules_and_exceptions(ended: Job, options: str, faults: str) -> None:
    job = ended(2, options, faults)
    assert "training continues after step" in job.text and "restarting" not in job.text, job.text
    assert_equal(job, ended(2, options))


def test_a_rank_that_dies_between_the_passes_of_a_step(ended: Job) -> None:
    job = ended(2, "dies within a step")
    assert "training continues after step 8 with rank 1 in a new process" in job.text
    assert_equal(job, ended(2))


def test_it_is_rehearsed_as_any_other(ended: Job) -> None:
    job = ended(2, "evaluation", every="every:3")
    assert "train() was exited and entered again 5 times, with equal results" in job.text
    assert_equal(job, ended(2, "evaluation"))


def test_a_trainer_that_is_not_the_same_again_restarts(ended: Job) -> None:
    job = ended(2, "noise", "kill:rank=1,step=9,point=backward")
    assert "costs a checkpoint and a restart: transformers.Trainer with neftune_noise_alpha" in job.text
    assert "restarting (1 of" in job.text and "no step lost" in job.text
