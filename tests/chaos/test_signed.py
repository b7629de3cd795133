"""A job with keys is killed, saves, resumes what it has signed with equal bits, and passes over what was tampered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.signing import fix_checksums, make_keys
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.verify import verify

TRAINER = """
import hashlib
import torch
import torch.distributed as dist
import ttp

last, dies_at = int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), lr=1e-3)
session = ttp.start(optimizer, save_dirs=[str(out / "checkpoints")])
point = session.resume()
note("resumed", point.step if point else 0)

def weights():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

@ttp.ttp_to_persist
def train():
    for step in range(optimizer.current_step + 1, last + 1):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        session.set_step_state(step, {})
        if (step, start) == (dies_at, "0"):
            dist.barrier()  # rank 0 has the record of the step before, which might otherwise be lost with rank 1
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if step in (8, 20):
            session.save()
            note(f"weights{step}", weights())
    note("weights", weights())

train()
session.close()
dist.destroy_process_group()
"""


def run(out: Path, *options: str, last: int, dies_at: int = 0, name: str = "launcher") -> str:
    """Train to the end, and return what the launcher has printed."""
    out.mkdir(exist_ok=True)
    arguments = (str(last), str(dies_at))
    with Launch(out, TRAINER, "--nproc-per-node", "2", *options, arguments=arguments, name=name) as launch:
        assert launch.wait() == 0, launch.text
        launch.assert_nothing_left()
        return launch.text


@pytest.mark.long
def test_a_killed_job_resumes_what_it_has_signed_and_nothing_else(tmp_path: Path) -> None:
    """The periodic checkpoint, that of the fault and the last one are signed; the run without keys has the same bits."""
    keys, out, whole = make_keys(tmp_path), tmp_path / "signed", tmp_path / "whole"
    options = ("--sign-key", str(tmp_path / "job.pem"), "--verify-key", str(tmp_path / "job.pub.pem"))
    run(whole, last=24)
    run(out, *options, last=20, dies_at=13)
    assert (out / "resumed-0-0").read_text() == "0" and (out / "resumed-1-1").read_text() == "12"
    for rank in (0, 1):
        assert (out / f"weights20-{rank}-1").read_text() == (whole / f"weights20-{rank}-0").read_text()
    paths = list_checkpoints([out / "checkpoints"])
    assert [verify(path, key=keys.verify).step for path in paths] == [20, 12, 8]
    flip_a_bit(paths[0], next(paths[0].glob("*.distcp")).name)
    fix_checksums(paths[0])
    assert verify(paths[0]).step == 20, "without a key it looks sound"
    text = run(out, *options, last=24, name="again")
    assert "manifest.json was altered, or another key has signed it" in text
    assert (out / "resumed-0-0").read_text() == (out / "resumed-1-0").read_text() == "12"
    assert (out / "weights-0-0").read_text() == (whole / "weights-0-0").read_text()
    assert verify(paths[0], key=keys.verify).step == 20, "it was trained again, and published in the place of the other"
