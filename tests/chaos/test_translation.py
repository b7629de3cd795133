"""The translation example as its document says: `preprocess.py`, `run.sh DATA_PATH RANK_SIZE`, and what it leaves in the device folders. Killed
under split layouts it has the losses and weights of a run without a fault; a checkpoint is recovered under another layout."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import JOB_S
from tests.chaos.test_schedulers import EXAMPLES, Script
from tests.ports import free_port
from ttp import open_checkpoint
from ttp.chaos.observed.training_job import read_jsonl

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"),
    pytest.mark.long,
    pytest.mark.timeout(900),
]

FOLDER = EXAMPLES / "translation"
TABLES = {number: str(FOLDER / f"rank_table_{number}pcs.json") for number in (2, 8, 16)}
SMALL = ("--vocab_size=320", "--d_model=32", "--batch_size=24", "--src_len=8", "--tgt_len=12", "--lr=0.001")
STEPS = 10
LINE = re.compile(r"^epoch: (\d+) step: (\d+), loss is (\d+\.\d{4})$", re.MULTILINE)


def script(folder: Path, *command: str, **environ: str) -> Script:
    """Start a command in a folder."""
    return Script(folder, "bash", "-c", 'cd "$0" && exec "$@"', str(folder), *command, **environ)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """Return a file of 240 pairs that preprocess.py has written."""
    with script(tmp_path, "python", str(FOLDER / "preprocess.py"), "--numerals=240", "--vocab_size=320") as job:
        assert job.wait() == 0, job.text
    return str(tmp_path / "output" / "wmt14.fr_en.txt")


def table_of(folder: Path, ranks: int) -> str:
    """Return a rank table of one machine."""
    servers = [{"server_id": "127.0.0.1", "device": [{"device_id": str(i), "rank_id": str(i)} for i in range(ranks)]}]
    path = folder / f"table_{ranks}.json"
    path.write_text(json.dumps({"version": "1.0", "server_count": "1", "server_list": servers, "status": "completed"}))
    return str(path)


def run(folder: Path, name: str, *words: str, faults: str = "", **settings: str) -> str:
    """Run a script of the example to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    command = ("bash", str(FOLDER / name), *words)
    with script(folder, *command, MASTER_PORT=str(free_port()), TTP_FAULTS=faults, **settings) as job:
        assert job.wait(JOB_S) == 0, job.text + "".join(path.read_text() for path in folder.glob("*/train.log*"))
        return job.text


def printed(log: Path) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for epoch, step, loss in LINE.findall(log.read_text()):
        found.setdefault((epoch, step), set()).add(loss)
    return found


def final(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "final.json").read_text())
    return read


def losses(folder: Path) -> dict[int, set[str]]:
    """Return the bits of each step's loss and norm, once or twice where a step was done again."""
    found: dict[int, set[str]] = {}
    for line in read_jsonl(folder / "metrics.jsonl"):
        if "step" in line:
            found.setdefault(int(line["step"]), set()).add(f"{line['loss']} {line['grad_norm']}")
    return found


def test_the_documents_commands_train_on_two_devices(pairs: str, tmp_path: Path) -> None:
    """`python preprocess.py`, `bash run.sh DATA_PATH 2`: the model is split over both, each has its folder with its variables and its losses,
    which begin near ln(vocab_size) and fall; the newest four checkpoints stay."""
    text = run(tmp_path, "run.sh", pairs, "2", *SMALL)
    assert "start training for device 0\nstart training for device 1\n" in text and "training success" in text
    for rank in (0, 1):
        log = tmp_path / f"device{rank}" / f"train.log{rank}"
        assert f"rank_id is {rank}, device_num is 2, dp is 1" in log.read_text()
        lines = printed(log)
        assert list(lines) == [("1", str(step)) for step in range(1, STEPS + 1)]
        values = [float(*loss) for loss in lines.values()]
        assert abs(values[0] - 5.768) < 0.1 and values[-1] < values[0]
        assert re.search(r"^epoch time: [\d.]+ ms, per step time: [\d.]+ ms$", log.read_text(), re.MULTILINE)
        assert f"RANK_ID={rank}\n" in (tmp_path / f"device{rank}" / f"env{rank}.log").read_text()
    kept = sorted(path.name for path in (tmp_path / "output" / "train" / "checkpoints").glob("iter_*"))
    assert kept == [f"iter_{step:07}" for step in range(STEPS - 3, STEPS + 1)]
    assert open_checkpoint(tmp_path / "output" / "train" / "checkpoints").layout["tensor_model_parallel_size"] == 2


@pytest.mark.parametrize(
    "layout",
    [
        ("MP=2",),
        ("MP=1", "--pipeline_stage=2", "--micro_batch_num=2"),
        ("MP=1", "--pipeline_stage=2", "--micro_batch_num=2", "--tied=true", "--vocab_emb_dp=false"),
    ],
    ids=["dp2mp2", "pp2dp2", "pp2dp2tied"],
)
def test_a_split_encoder_decoder_survives_kills_bit_for_bit(
    pairs: str, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """SIGKILL while gradients are sent, in the update, and of rank 0; the file of pairs and the layout are the script's."""
    name, _, value = layout[0].partition("=")
    settings = {name: value, "RANK_TABLE_FILE": table_of(tmp_path, 4)}
    words = (pairs, "4", *SMALL, *layout[1:])
    faults = "kill:rank=3,step=3,point=backward,round=0;kill:rank=1,step=5,point=updating,round=1;kill:rank=0,step=8,point=ready,round=2"
    run(tmp_path / "whole", "run.sh", *words, **settings)
    text = run(tmp_path / "faulted", "run.sh", *words, faults=faults, **settings)
    assert len(re.findall(r"restarting \(", text)) == 3, text
    whole, faulted = (tmp_path / which / "output" / "train" for which in ("whole", "faulted"))
    expected, found = losses(whole), losses(faulted)
    assert found == expected and all(len(bits) == 1 for bits in found.values()) and len(found) == STEPS
    assert final(faulted) == final(whole)
    first, again = (printed(tmp_path / which / "device0" / "train.log0") for which in ("whole", "faulted"))
    assert len(again) >= STEPS - 3 and again.items() <= first.items()


def test_a_checkpoint_is_recovered_under_another_layout(pairs: str, tmp_path: Path) -> None:
    """Saved by eight ranks, model parallel 4 x data parallel 2; recovered by four in two stages, for two more epochs."""
    run(tmp_path, "run_parallel_save_ckpt.sh", pairs, *SMALL, "--epochs=1")
    saved = tmp_path / "output" / "saved"
    assert final(saved)["step"] == STEPS
    assert (tmp_path / "ckpt_dir7" / "train.log7").is_file()
    settings = {"MP": "1", "RANK_SIZE": "4", "RANK_TABLE_FILE": table_of(tmp_path, 4)}
    run(
        tmp_path, "run_parallel_recover_ckpt.sh", pairs, *SMALL, "--pipeline_stage=2", "--micro_batch_num=2", **settings
    )
    recovered = tmp_path / "output" / "recovered"
    assert final(recovered)["step"] == 3 * STEPS
    assert list(losses(recovered)) == list(range(STEPS + 1, 3 * STEPS + 1))
    assert ("3", str(STEPS)) in printed(tmp_path / "recover0" / "train.log0")
    with script(
        tmp_path,
        "python",
        str(FOLDER / "train.py"),
        f"--file_path={pairs}",
        *SMALL,
        "--train=0",
        f"--output_dir={recovered}",
    ) as job:
        assert job.wait() == 0, job.text
    loss = re.search(rf"^step: {3 * STEPS}, loss is (\d+\.\d{{4}})$", job.text, re.MULTILINE)
    assert loss and float(loss[1]) < 5.7


def test_eight_devices_train_the_documents_split(pairs: str, tmp_path: Path) -> None:
    """`bash run.sh DATA_PATH 8`: model parallel 8, with ten positions that eight ranks could not divide."""
    assert "training success" in run(
        tmp_path, "run.sh", pairs, "8", *SMALL, "--src_len=10", "--tgt_len=10", "--batch_size=80"
    )
    assert list(printed(tmp_path / "device7" / "train.log7")) == [("1", "1"), ("1", "2"), ("1", "3")]


def test_two_machines_train_two_stages(pairs: str, tmp_path: Path) -> None:
    """`run_cluster.sh` on each, with the table of both; two addresses of this one stand for two machines."""
    table = tmp_path / "rank_table.json"
    content = json.loads(Path(TABLES[16]).read_text())
    for number, server in enumerate(content["server_list"]):
        server["device"] = [{"device_id": str(i), "rank_id": str(2 * number + i)} for i in (0, 1)]
    table.write_text(json.dumps(content))
    settings = {"MASTER_PORT": str(free_port()), "DEVICES": "2"}
    command = ("bash", str(FOLDER / "run_cluster.sh"), pairs, str(table), "4")
    folders = [tmp_path / name for name in ("first", "second")]
    shared = f"--output_dir={tmp_path / 'shared'}"
    for folder in folders:
        folder.mkdir()
    with (
        script(folders[0], *command, "0", *SMALL, shared, **settings) as one,
        script(folders[1], *command, "2", *SMALL, shared, **settings) as other,
    ):
        assert [job.wait(JOB_S) for job in (one, other)] == [0, 0], one.text + other.text
    assert final(tmp_path / "shared")["step"] == STEPS
    assert ("1", str(STEPS)) in printed(folders[1] / "device_3" / "train3.log")


def test_ttprun_starts_the_program_itself(pairs: str, tmp_path: Path) -> None:
    """Without run.sh, on four ranks: model parallel 2 x data parallel 2, each rank with or without a folder of its own."""
    for folder, words in (
        ("whole", [str(FOLDER / "train.py")]),
        ("apart", ["--no-python", str(FOLDER / "on_device.sh"), "device", str(FOLDER / "train.py")]),
    ):
        options = ("--distribute", "true", "--mp", "2", "--file_path", pairs, *SMALL, "--output_dir", folder)
        command = (sys.executable, "-m", "ttp.launch", "--nproc-per-node", "4", *words, *options)
        with script(tmp_path, *command, "--batch_size", "48") as job:
            assert job.wait(JOB_S) == 0, job.text
    assert final(tmp_path / "apart") == final(tmp_path / "whole")
    assert list(printed(tmp_path / "device3" / "train.log3")) == [("1", str(step)) for step in range(1, STEPS // 2 + 1)]
