"""The settings of torch's NCCL watchdog: set by ttprun, kept where the user chose, and checked at start."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ttp
from ttp.config import Settings
from ttp.launch import main
from ttp.nccl import NCCL_SETTINGS, nccl_warnings, set_nccl
from ttp.optim.step_agreement import communicators
from ttp.runtime import rank_runtime


def test_every_setting_is_set_that_the_user_left_open() -> None:
    environ = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    set_nccl(environ)
    assert environ == {name: value for name, (value, _) in NCCL_SETTINGS.items()} | {"TORCH_NCCL_BLOCKING_WAIT": "1"}


def test_a_setting_that_the_user_chose_otherwise_is_named() -> None:
    """With what it does, and what to do."""
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    set_nccl(environ)
    (line,) = nccl_warnings(environ)
    assert line.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING='3': expected 0, as other values end a surviving process")
    assert line.endswith("Unset it; ttprun sets it")


def test_without_ttprun_each_missing_setting_is_named() -> None:
    """Settings read them once, from the environment of the process."""
    lines = Settings.from_env({}).nccl_warnings
    assert [line.split()[0] for line in lines] == list(NCCL_SETTINGS)
    assert all(" is not set: expected 0, as " in line and "start the job with ttprun" in line for line in lines)


def test_one_hardware_queue_is_warned_of() -> None:
    """Megatron-LM's scripts ask for it; a dump's copies would wait behind a kernel that hangs."""
    environ = {name: value for name, (value, _) in NCCL_SETTINGS.items()}
    for value, count in (("1", 1), ("8", 0), ("", 0)):
        lines = nccl_warnings({**environ, "CUDA_DEVICE_MAX_CONNECTIONS": value})
        assert [line.split(":")[0] for line in lines] == ["CUDA_DEVICE_MAX_CONNECTIONS='1'"] * count
    assert nccl_warnings(environ) == ()


@pytest.mark.parametrize(("device", "backend", "count"), [("xpu", "xccl", 1), ("xpu", "gloo", 0), ("cpu", "xccl", 0)])
def test_a_backend_that_cannot_report_errors_is_named_at_start(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, count: int
) -> None:
    """Gloo raises by itself, and so does all on the CPU."""

    class Silent:
        def name(self) -> str:
            return backend

    group = SimpleNamespace(_get_backend=lambda device: Silent())
    monkeypatch.setattr(communicators, "all_groups", lambda: [group, group])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    lines = list(rank_runtime._warnings(torch.device(device), Settings(), 0, 2))
    assert [line.split(" cannot")[0] for line in lines] == [f"process groups of backend {backend}"] * count


def test_torch_knows_each_setting() -> None:
    """By the header that it ships, where it does."""
    headers = list(Path(torch.__file__).parent.rglob("ProcessGroupNCCL.hpp"))
    for header in headers:
        text = header.read_text(encoding="utf-8")
        assert [name for name in NCCL_SETTINGS if f'"{name}"' not in text] == []


@pytest.mark.parametrize(("use_ttp", "expected"), [("True", "0"), ("False", None)])
def test_ttprun_sets_them_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, use_ttp: str, expected: str | None
) -> None:
    """Without TTP the job is torchrun's."""
    for name in NCCL_SETTINGS:
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("ENABLE_TTP", use_ttp)
    found: list[dict[str, str | None]] = []

    def started(*arguments: object) -> None:
        found.append({name: os.environ.get(name) for name in NCCL_SETTINGS})

    monkeypatch.setattr(main, "launch", started)
    monkeypatch.setattr("torch.distributed.run.run", started)
    main.main(["--nproc-per-node", "1", "train.py"])
    assert found == [dict.fromkeys(NCCL_SETTINGS, expected)]


@pytest.mark.parametrize(("device", "count"), [("cuda", 1), ("cpu", 0)])
def test_a_start_on_an_accelerator_shows_each_line_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    monkeypatch.setattr(
        "ttp.runtime.state_provider.HostCopier", lambda device: None
    )  # this host may have no such device
    optimizer = ttp.TTPReplicaOptimizer(torch.nn.Linear(8, 4).named_parameters(), replicas=1, lr=0.05)
    optimizer.device = torch.device(device)
    session = ttp.start(optimizer, save_dirs=[tmp_path], settings=Settings(nccl_warnings=("TORCH_NCCL_X is not set",)))
    optimizer.device = torch.device("cpu")
    session.close()
    assert caplog.text.count("TORCH_NCCL_X is not set") == count
