"""A replica's memory is altered in a running job: the next comparison names the parameter, the ranks and the step."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.launching import Launch

TRAINER = """
import torch
import torch.distributed as dist
import ttp

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), lr=1e-3, compare_every=10)
session = ttp.start(optimizer, save_dirs=[str(out / "checkpoints")])
session.resume()

@ttp.ttp_to_persist
def train():
    for step in range(optimizer.current_step + 1, 41):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        session.set_step_state(step, {})
        optimizer.step()
        if (rank, step) == (1, 23):
            for tensors in optimizer.holdings().values():
                target = next(tensor for tensor in tensors if tensor.key.endswith("0.weight.exp_avg"))
                target.values[3:4].view(torch.int32).bitwise_xor_(1 << 20)

train()
note("found", "|".join(divergence.key for divergence in optimizer.divergences))
session.close()
dist.destroy_process_group()
"""


def test_an_altered_moment_is_reported_with_its_name_ranks_and_step(tmp_path: Path) -> None:
    with Launch(tmp_path, TRAINER, "--nproc-per-node", "2") as launch:
        assert launch.wait() == 0, launch.text
        reported = [line for line in launch.text.splitlines() if "replicas differ in" in line]
        launch.assert_nothing_left()
    assert len(reported) == 1, launch.text
    assert re.search(
        r"step 30: replicas differ in .*0\.weight\.exp_avg\[\d+:\d+\].*: rank 0 against rank 1", reported[0]
    ), reported
    assert re.search(
        r"(They were equal after step \d+|No comparison before found them equal): check these hosts, and go back to (/|a checkpoint)",
        reported[0],
    ), reported
    found = [launch.read(name).split("|") for name in launch.notes("found")]
    assert len(found) == 2 and found[0] == found[1], "both ranks know"
    assert all("0.weight" in key for key in found[0]), "nothing else differs"
