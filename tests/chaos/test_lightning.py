"""PyTorch Lightning's Trainer, protected by its callback. In an environment of its own: the library is not a test dependency."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, install_library
from tests.chaos.test_commands import ROOT
from tests.chaos.test_other_trainers import EXAMPLES, compare, marked, steps_of, train

PACKAGES = ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")
EXAMPLE = EXAMPLES / "lightning" / "train.py"

VARIANT = """
import os, sys, torch
sys.path.insert(0, {examples!r})
import train
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

class Last(Callback):
    def on_exception(self, trainer, module, exception):
        print("Lightning goes on after the exception", file=sys.stderr, flush=True)

class Stream(IterableDataset):
    def __iter__(self):
        for number in range(64):
            yield torch.randn(8), torch.tensor(number % 2)

def loader(samples, **options):
    if options.get("shuffle"):
        return {{"stateful": StatefulDataLoader(samples, **options), "stream": DataLoader(Stream(), batch_size=4)}}.get(
            {kind!r}, DataLoader(samples, **options))
    return DataLoader(samples, **options)

def trainer(**options):
    if {kind!r} == "schedules":
        options["enable_checkpointing"] = True
        options["callbacks"] += [EarlyStopping("val_loss", patience=3), Last(), ModelCheckpoint(os.environ["FOLDER"], monitor="val_loss")]
    if {kind!r} == "shards":
        options |= {{"strategy": ModelParallelStrategy(2, 1), "gradient_clip_val": None}}
        options["callbacks"][0]._options |= {{"copies": "memory", "copy_every": 1}}
    return Whole(**options)

class Whole(Trainer):
    def fit(self, model, *loaders):
        super().fit(model, *loaders)
        if {kind!r} == "shards":
            whole = [value.full_tensor() for value in model.parameters()]
            model.parameters = lambda: whole

class Classifier(train.Classifier):
    def configure_model(self):
        if {kind!r} == "shards" and not hasattr(self, "split"):
            self.net[1] = torch.nn.Identity()
            self.split = fully_shard(self.net, mesh=self.device_mesh["data_parallel"]) is not None

    def configure_optimizers(self):
        if {kind!r} != "schedules":
            return super().configure_optimizers()
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        often = {{"scheduler": CosineAnnealingLR(optimizer, 30), "interval": "step", "frequency": 2}}
        return [optimizer], [often, {{"scheduler": StepLR(optimizer, 1, 0.7), "interval": "epoch"}}]

train.DataLoader, train.Trainer, train.Classifier = loader, trainer, Classifier
train.main()
"""

REFUSED = """
from types import SimpleNamespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import FSDPStrategy
from ttp.adopt.lightning_callback import TTPLightning

class Manual(BoringModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

class Takes(BoringModel):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)

class Untrained(BoringModel):
    def configure_optimizers(self):
        return None

def refused(model, callbacks=(), **options):
    protection = TTPLightning(save_dirs=["save"])
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, callbacks=[protection, *callbacks], **quiet, **options)
    try:
        trainer.fit(model)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

def refused_strategy(strategy):
    trainer = SimpleNamespace(strategy=strategy, callbacks=[], lightning_module=BoringModel())
    try:
        TTPLightning(save_dirs=["save"]).on_train_start(trainer, trainer.lightning_module)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

refused(Manual())
refused_strategy(object.__new__(FSDPStrategy))  # would look for a GPU
refused(Untrained())
refused(Takes())
refused(BoringModel(), reload_dataloaders_every_n_epochs=1)
refused(BoringModel(), callbacks=[StochasticWeightAveraging(0.1, swa_epoch_start=1)])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_library(tmp_path_factory.mktemp("library"), PACKAGES)


@pytest.fixture(autouse=True)
def with_library(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(library))


def evaluations(text: str) -> set[str]:
    return set(re.findall(r"after step \d+: .*", text))


@pytest.mark.long
def test_lightnings_trainer_killed_twice_has_the_baseline_run_s_bits(tmp_path: Path) -> None:
    """An evaluation is due behind the first step that is saved; behind the second the epoch ends, and the rate falls by a metric of an earlier
    evaluation. Its callback and an import are all that was added."""
    assert len(marked(EXAMPLE.read_text())) == 2
    whole = train(tmp_path / "whole", 2, "lightning/train.py")
    assert len(steps_of(whole)) == 24 and len(evaluations(whole)) == 6
    faults = "kill:rank=1,step=7,point=record;kill:rank=0,step=16,point=updating,round=1"
    faulted = train(tmp_path / "faulted", 2, "lightning/train.py", faults=faults)
    compare(whole, faulted)
    assert evaluations(whole) == evaluations(faulted)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["schedules", "stateful", "stream"])
def test_what_else_a_lightning_trainer_has_comes_back_with_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Schedules by steps and epochs with Lightning's own checkpoints and EarlyStopping; loaders with a state; data without a length, which Lightning reads ahead.
    An exception is held before Lightning takes the model down."""
    script = tmp_path / "train.py"
    script.write_text(VARIANT.format(examples=str(EXAMPLE.parent), kind=kind))
    monkeypatch.setenv("FOLDER", str(tmp_path / "lightning"))
    whole = train(tmp_path / "whole", 2, str(script))
    first = "raise:rank=0,step=9,point=backward" if kind == "schedules" else "kill:rank=0,step=8,point=updating"
    faulted = train(tmp_path / "faulted", 2, str(script), faults=f"{first};kill:rank=1,step=13,point=ready,round=1")
    compare(whole, faulted)
    assert evaluations(whole) == evaluations(faulted)
    if kind == "schedules":
        assert faulted.index("holding this rank's shards") < faulted.index("Lightning goes on after the exception")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("shards", "kill:rank=0,step=8,point=updating", r"saved step \d from copies in the memory"),
        ("", "term:rank=0,step=9,point=updating", "1 preemption notice"),
    ],
)
def test_a_lightning_trainer_goes_on_after_a_notice_and_from_copies_in_memory(
    tmp_path: Path, kind: str, fault: str, words: str
) -> None:
    """FSDP2 by ModelParallelStrategy, full shard: what the dead rank held has no replica, and a step is done again. SIGTERM is TTP's: Lightning's handler
    would broadcast in the middle of a step."""
    script = tmp_path / "train.py"
    script.write_text(VARIANT.format(examples=str(EXAMPLE.parent), kind=kind))
    whole = train(tmp_path / "whole", 2, str(script))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ttp.launch",
            "--nproc-per-node",
            "2",
            str(script),
            "--save-dir",
            str(tmp_path / "save"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TTP_FAULTS": fault},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    faulted = done.stdout + done.stderr
    assert done.returncode == 0 and re.search(words, faulted), faulted
    compare(whole, faulted)


@pytest.mark.long
def test_what_lightning_does_that_cannot_be_protected_is_refused_at_the_start(tmp_path: Path) -> None:
    """One line each, before the first step, with the nearest way that works."""
    script = tmp_path / "train.py"
    script.write_text(REFUSED)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    found = re.findall(r"^ConfigError (\w+): got .*expected|^ConfigError (\w+): .*expected", done.stdout, re.MULTILINE)
    assert [first or second for first, second in found] == [
        "automatic_optimization",
        "strategy",
        "configure_optimizers",
        "training_step",
        "reload_dataloaders_every_n_epochs",
        "callbacks",
    ], done.stdout + done.stderr
