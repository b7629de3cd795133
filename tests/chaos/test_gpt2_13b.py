"""The GPT2-13B example as its users run it: tables, `run_distribute.sh ... train` on every machine, then `predict`, with a tiny model."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml

from tests.chaos.test_schedulers import EXAMPLES, Script
from tests.ports import free_port
from tests.unit.examples.loading import module_of
from ttp import cli
from ttp.chaos.observed.training_job import read_jsonl
from ttp.trainer import generate
from ttp.trainer.model.weights import model_of, open_trained
from ttp.trainer.parallel.mesh import Mesh
from ttp.trainer.parallel.pipeline_stages import hash_weights

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.timeout(900)]

FOLDER = EXAMPLES / "gpt2_13b"
SCRIPT = str(FOLDER / "scripts" / "run_distribute.sh")
STEPS = 4


def make_table(folder: Path, addresses: Sequence[str], devices: int) -> str:
    """Make the table of each machine and merge them, with the example's own tools; return the merged one's path."""
    tools, tables = FOLDER / "tools", []
    for address in addresses:
        words = [str(tools / "hccl_tools.py"), "--device_num", f"[0,{devices})", "--server_ip", address]
        tables.append(subprocess.check_output([sys.executable, *words], cwd=folder, text=True).strip())
    merge = [sys.executable, str(tools / "merge_hccl.py"), *tables]
    return subprocess.check_output(merge, cwd=folder, text=True).strip()


def write_config(folder: Path, data: int, tensor: int, stages: int, micro_batches: int) -> str:
    """Write the shipped file for the CPU, with a tiny model and this layout; return its path."""
    tree = yaml.safe_load((FOLDER / "configs" / "gpt2" / "run_gpt2_13b.yaml").read_text(encoding="utf-8"))
    tree["context"]["device_target"] = "CPU"
    tree["parallel_config"] |= {
        "data_parallel": data,
        "model_parallel": tensor,
        "pipeline_stage": stages,
        "micro_batch_num": micro_batches,
    }
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 257}
    tree["model_config"] = sizes | {"params_dtype": "float32", "compute_dtype": "float32"}
    tree["training_config"] = {"output_dir": str(folder / "output"), "training_iters": STEPS}
    path = folder / "run_gpt2_tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


def train(folder: Path, addresses: Sequence[str], devices: int, layout: tuple[int, int, int, int]) -> tuple[str, str]:
    """Train on every machine at once; return the paths of the table and of the configuration."""
    table, config = make_table(folder, addresses, devices), write_config(folder, *layout)
    size, port = len(addresses) * devices, str(free_port())
    ranges = [f"[{node * devices},{(node + 1) * devices}]" for node in range(len(addresses))]
    machines = [folder / f"machine{node}" for node in range(len(addresses))]
    with contextlib.ExitStack() as stack:
        jobs = []
        for machine, device_range in zip(machines, ranges, strict=True):
            machine.mkdir()
            words: tuple[str, ...] = ("bash", SCRIPT, table, config, device_range, "train", str(size))
            jobs.append(stack.enter_context(Script(machine, *words, MASTER_PORT=port)))
        assert [job.wait(800.0) for job in jobs] == [0] * len(jobs), "".join(job.text for job in jobs)
        assert [job.leftovers() for job in jobs] == [[]] * len(jobs)
    assert max(int(line.get("step", 0)) for line in read_jsonl(folder / "output" / "metrics.jsonl")) == STEPS
    written = "".join(job.text for job in jobs)
    assert written.count("parallel_config.vocab_emb_dp: True has no effect") == 1, "rank 0 logs the notes for all"
    return table, config


def train_and_predict(folder: Path, addresses: Sequence[str], devices: int, layout: tuple[int, int, int, int]) -> None:
    """Train, predict on every machine, merge the checkpoint into one file."""
    table, config = train(folder, addresses, devices, layout)
    texts = []
    for node in range(len(addresses)):
        device_range, place = f"[{node * devices},{(node + 1) * devices}]", folder / f"machine{node}" / "predict"
        place.mkdir()
        words = ("bash", SCRIPT, table, config, device_range, "predict", str(len(addresses) * devices))
        with Script(place, *words, "--greedy", "--max-new-tokens=8", PROMPT="The list ") as job:
            assert job.wait() == 0, job.text
            texts.append(job.text)
    assert re.search(rf"iter_{STEPS:07}: step {STEPS}\nThe list ", texts[0]), texts
    assert all("the first machine generates the text" in text for text in texts[1:])

    merged = folder / "merged.pt"
    assert cli.main(["ckpt", "export", str(folder / "output"), str(merged), "--to", "torch"]) == 0
    weights = torch.load(merged, weights_only=True)["model"]
    model = model_of(open_trained(str(folder / "output")).config, weights, torch.device("cpu"), str(merged))
    assert hash_weights([model], Mesh()) == json.loads((folder / "output" / "final.json").read_text())["weights_sha256"]


@pytest.mark.long
def test_one_device_trains_and_text_comes_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shortest job of the script; the generator's command runs here."""
    table, config = train(tmp_path, ["127.0.0.1"], 1, (1, 1, 1, 1))
    run_distribute = module_of("gpt2_13b/tools/run_distribute.py")
    words = run_distribute.command([table, config, "[0,1]", "predict", "1", "--greedy", "--max-new-tokens=8"], {})
    assert generate.main(words[3:]) == 0
    assert capsys.readouterr().out.startswith("The list ")


@pytest.mark.long
def test_one_machine_trains_two_stages_and_predicts(tmp_path: Path) -> None:
    """A table of one machine; the checkpoint of a pipeline of two ranks is read by the one process that generates."""
    train_and_predict(tmp_path, ["127.0.0.1"], 2, (1, 1, 2, 2))


@pytest.mark.long
def test_two_machines_train_the_documents_split_and_predict(tmp_path: Path) -> None:
    """Tensor 2 x pipeline 4, as the document splits the model, on two machines of four devices: each range is one machine's."""
    train_and_predict(tmp_path, ["127.0.0.1", "127.0.0.2"], 4, (1, 2, 4, 24))
