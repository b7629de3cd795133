"""A process that has torch and not ttp reads a checkpoint and trains on, as if it had written it itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from ttp.checkpoint.format import keys

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 11))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0, "lr": 2e-3}]
    return model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.95))

def train(model, optimizer, first, last):
    for step in range(first, last):
        tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

READER = """
import sys, warnings

class NoTTP:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ttp", "controller", "processor", "proto"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, NoTTP())
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

path, reference, out = sys.argv[1:]
expected = torch.load(reference, weights_only=True)

def check(model, optimizer, where):
    found_model, found_optim = get_state_dict(model, optimizer)
    for key, value in expected["model"].items():
        assert torch.equal(found_model[key], value), (where, key)
    for fqn, state in expected["optim"]["state"].items():
        for name, value in state.items():
            assert torch.equal(found_optim["state"][fqn][name], value), (where, fqn, name)
    assert found_optim["param_groups"] == expected["optim"]["param_groups"], where
    train(model, optimizer, 5, 9)
    for key, value in expected["later"].items():
        assert torch.equal(model.state_dict()[key], value), (where, "trained on", key)

for flatten in (False, True):
    model, optimizer = build()
    for group in optimizer.param_groups:
        group["lr"] = 77.0
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    check(model, optimizer, f"dcp.load, flatten={flatten}")

dcp_to_torch_save(path, out)
saved = torch.load(out, weights_only=True)
model, optimizer = build()
set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
check(model, optimizer, "dcp_to_torch_save")
assert not [name for name in sys.modules if name.split(".")[0] == "ttp"]
print("EQUAL")
"""


def test_torch_alone_loads_a_checkpoint_and_trains_on(job: Job, tmp_path: Path) -> None:
    """Weights, moments, hyperparameters and four more steps are equal bit for bit, in each form that torch offers."""
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    build, train = scope["build"], scope["train"]
    assert callable(build) and callable(train)
    model, optimizer = build()
    train(model, optimizer, 0, 5)
    states: tuple[dict[str, Any], dict[str, Any]] = cast(Any, get_state_dict(model, optimizer))
    model_state, optim_state = states
    tensors = {keys.model_key(fqn): t.clone() for fqn, t in model_state.items()}
    for fqn, state in optim_state["state"].items():
        tensors |= {keys.optim_state_key(fqn, name): t.clone() for name, t in state.items()}
    blobs = keys.param_group_blobs(optim_state["param_groups"])
    path = type(job)(tensors).save(tmp_path / "ckpt", 5, 3, blobs=blobs)
    expected = {"model": {k: t.clone() for k, t in model_state.items()}, "optim": optim_state}
    torch.save(expected, tmp_path / "expected.pt")
    kept = torch.load(tmp_path / "expected.pt", weights_only=True)
    train(model, optimizer, 5, 9)
    torch.save(kept | {"later": model.state_dict()}, tmp_path / "expected.pt")
    script = tmp_path / "reader.py"
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"  # the bits depend on it
    script.write_text(threads + MODEL + READER)
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(path), str(tmp_path / "expected.pt"), str(tmp_path / "out.pt")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "EQUAL" in done.stdout, done.stderr[-3000:]
