"""Devices, the launcher's environment and logs."""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

import ttp
from ttp.errors import ConfigError, NotAsBefore
from ttp.trainer.devices.binding import bind, bind_shared, choose_device
from ttp.trainer.devices.device_table import DEVICES, DeviceName
from ttp.trainer.logs import LOGGER, open_logs
from ttp.trainer.metrics import StepMetrics
from ttp.trainer.train import Trainer
from ttp.trainer.world import World, check_agreement, joined, world_from_env

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_has_every_name_that_the_configuration_takes() -> None:
    """And the host beside each accelerator: checkpoints and small messages need its backend."""
    assert set(get_args(DeviceName)) == {"auto", *DEVICES}
    assert {name: kind.backends for name, kind in DEVICES.items()} == {
        "cuda": "cpu:gloo,cuda:nccl",
        "xpu": "cpu:gloo,xpu:xccl",
        "npu": "cpu:gloo,npu:hccl",
        "musa": "cpu:gloo,musa:mccl",
        "plugin": "cpu:gloo,plugin:",
        "cpu": "gloo",
    }


def names_of_devices(source: str) -> list[int]:
    """Return the lines of code (without documentation) that name a device or a backend, in text or as torch.<device>."""
    tree = ast.parse(source)
    named = re.compile(r"\b(cpu|cuda|xpu|npu|musa|gloo|nccl|xccl|hccl|mccl)\b")
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs
            and named.search(node.value)
        )
        or (
            isinstance(node, ast.Attribute)
            and ast.unparse(node).startswith(("torch.cuda", "torch.xpu", "torch.npu", "torch.musa"))
        )
    ]


def test_nothing_but_the_table_names_a_device() -> None:
    """A new device is a new row, and nothing else."""
    assert names_of_devices('device = torch.device("cuda:0")') and names_of_devices("torch.cuda.synchronize()")
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        if path.name != "device_table.py":
            lines = names_of_devices(path.read_text(encoding="utf-8"))
            assert not lines, f"{path.relative_to(ROOT)}, lines {lines}: name it in device_table.py"


def test_missing_plug_in_is_named() -> None:
    """With what to do."""
    for name in ("npu", "musa"):
        with pytest.raises(
            ConfigError,
            match=rf"device is '{name}': the torch plug-in torch_{name} is not installed: install it, or use cpu or auto",
        ):
            choose_device(name)


def test_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may know CUDA on a host without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"^training_config.device is 'cuda': torch .* finds no cuda device on this host: use cpu"
    ):
        choose_device("cuda")
    with pytest.raises(ConfigError, match=r"^--device is 'cuda': "):
        choose_device("cuda", "--device")
    assert choose_device("auto").name == "cpu"


def test_first_accelerator_is_taken_and_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in is imported, asked, and given the local rank; a rank too many is refused."""
    reported: list[int] = []
    device = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, set_device=reported.append)
    plugin = types.ModuleType("torch_npu")
    plugin.__spec__ = types.SimpleNamespace(name="torch_npu")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch_npu", plugin)
    monkeypatch.setattr(torch, "npu", device, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kind = choose_device("auto")
    assert (kind.name, kind.backend) == ("npu", "hccl")
    with pytest.raises(ConfigError, match=r"local rank 2 has no npu device of its own: this host has 2"):
        bind(kind, 2)
    assert reported == []


def test_ranks_can_share_a_hosts_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the device's backend each is on a host of its own, unless the user has said which."""
    chosen: list[int] = []
    device = types.SimpleNamespace(device_count=lambda: 1, set_device=chosen.append)
    monkeypatch.setattr(torch, "cuda", device)
    for given, expected in ((None, "rank 5"), ("mine", "mine")):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        if given is not None:
            monkeypatch.setenv("NCCL_HOSTID", given)
        assert bind_shared(DEVICES["cuda"], 5) == torch.device("cuda", 0)
        assert os.environ["NCCL_HOSTID"] == expected
    assert chosen == [0, 0]
    monkeypatch.delenv("NCCL_HOSTID")
    assert bind_shared(DEVICES["cpu"], 5) == torch.device("cpu") and "NCCL_HOSTID" not in os.environ


def test_world_is_read_from_the_launcher() -> None:
    """Alone without one; half an environment is refused."""
    assert world_from_env({}) == World(0, 1, 0, launched=False)
    assert world_from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == World(3, 4, 1, launched=True)
    for environ, expected in (
        ({"RANK": "0"}, r"WORLD_SIZE, LOCAL_RANK not set, though others are"),
        ({"RANK": "x", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, r"got RANK=x, .*expected integers"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, r"got RANK=4, expected 0 to 3"),
    ):
        with pytest.raises(ConfigError, match=expected):
            world_from_env(environ)


def test_lone_process_needs_no_port() -> None:
    """A group of one over a store in memory."""
    with joined(World(0, 1, 0, launched=False), DEVICES["cpu"], torch.device("cpu")):
        assert dist.get_world_size() == 1
        check_agreement("text", "abc", torch.device("cpu"))
    assert not dist.is_initialized()


def test_ranks_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, before training."""

    def gather(everyone: list[torch.Tensor], mine: torch.Tensor) -> None:
        for rank, tensor in enumerate(everyone):
            tensor.copy_(mine + (rank in (1, 3)))

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(ConfigError, match=r"ranks \[1, 3\] were started with another text than rank 0"):
        check_agreement("text", "abc", torch.device("cpu"))


@pytest.mark.parametrize(
    ("path", "configuration", "text", "differs"),
    [
        ("", "as it was", "as it was", ""),
        ("", "another", "as it was", "configuration"),
        ("", "as it was", "another", "text"),
        ("/c/iter_0000003", "another", "another", ""),
    ],
)
def test_a_process_in_a_lost_ones_place_trains_as_the_others_do(
    path: str, configuration: str, text: str, differs: str
) -> None:
    """With the configuration and the text that they have; a restart takes what is there then."""
    state = {
        "consumed_samples": 12,
        "epoch": 0,
        "loss_divisor": 1,
        "order": {"text": "as it was"},
        "configuration": "as it was",
    }
    trainer: Any = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[]),
        config=SimpleNamespace(training_config=SimpleNamespace(resume="auto", seed=1)),
        session=SimpleNamespace(resume=lambda choice, check: ttp.ResumePoint(3, state, None, path, ())),
        world=SimpleNamespace(size=2, rank=1),
        metrics=None,
        order={"text": text},
        configuration=configuration,
    )
    trainer._check_same = partial(Trainer._check_same, trainer)
    if differs:
        with pytest.raises(NotAsBefore, match=f"its {differs} differ from the job's"):
            Trainer._resume(trainer)
    else:
        assert Trainer._resume(trainer) == (3, 12)


STEP = StepMetrics(
    step=3,
    epoch=0,
    loss=1.0,
    grad_norm=1.0,
    learning_rates=(1e-3,),
    loss_scale=1.0,
    skipped=False,
    tokens=8,
    time_s=0.5,
    consumed_samples=6,
)


def test_logs_go_to_the_ranks_own_files_and_are_appended_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """info.log has everything, error.log the errors; only rank 0 speaks on the console."""
    for rank, start in ((0, "first"), (1, "first"), (0, "second")):
        with open_logs(tmp_path, rank) as run_log:
            logging.getLogger("ttp.anything").info("%s start", start)
            logging.getLogger("ttp.anything").error("%s error", start)
            run_log.step(STEP, line=True)
            run_log.step(STEP, line=False)
    assert LOGGER.handlers == []
    lines = (tmp_path / "log" / "rank_0" / "info.log").read_text().splitlines()
    assert [line.split(" INFO ")[-1].split(" ERROR ")[-1] for line in lines] == [
        "first start",
        "first error",
        STEP.text(),
        "second start",
        "second error",
        STEP.text(),
    ]
    assert " rank 0 INFO first start" in lines[0] and lines[2].startswith("train: Epoch:0, Step:3, ")
    errors = (tmp_path / "log" / "rank_0" / "error.log").read_text().splitlines()
    assert [line.split(" ERROR ")[-1] for line in errors] == ["first error", "second error"]
    assert (tmp_path / "log" / "rank_1" / "info.log").read_text().count("\n") == 3
    assert capsys.readouterr().out.count("first error") == 1


def test_a_record_that_comes_late_opens_no_log_again(tmp_path: Path) -> None:
    """Of a thread that had the handler before it was closed: nothing would close the file then."""
    with open_logs(tmp_path, 0):
        handlers = [handler for handler in LOGGER.handlers if isinstance(handler, logging.FileHandler)]
    assert handlers
    for handler in handlers:
        handler.handle(logging.LogRecord("ttp", logging.ERROR, "", 0, "late", (), None))
        assert handler.stream is None
