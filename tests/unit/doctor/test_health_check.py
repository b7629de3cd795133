"""The built-in health check: what makes a node sick, and what cannot be looked at and is not judged."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ttp.doctor import health_check, two_nodes
from ttp.doctor.finding import FAILED, OK, WARNING, Finding
from ttp.doctor.health_check import HEALTHY, SICK, main


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has everything, and is well."""
    edac = tmp_path / "edac" / "mc0"
    edac.mkdir(parents=True)
    (edac / "ue_count").write_text("0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable:   8388608 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/pod\n")
    (tmp_path / "cgroups" / "pod").mkdir(parents=True)
    (tmp_path / "kmsg").write_text("")
    (tmp_path / "driver").touch()
    (tmp_path / "tmp").mkdir()
    for name, file in (
        ("EDAC", "edac"),
        ("PROC", "."),
        ("CGROUPS", "cgroups"),
        ("KERNEL_LOG", "kmsg"),
        ("DRIVER", "driver"),
    ):
        monkeypatch.setattr(health_check, name, tmp_path / file)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    smi(tmp_path, "echo '0, 0, No'; echo '1, [N/A], [N/A]'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def container(machine: Path, limit: int, used: int) -> None:
    (machine / "cgroups" / "pod" / "memory.max").write_text(f"{limit}\n")
    (machine / "cgroups" / "pod" / "memory.current").write_text(f"{used}\n")


def smi(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def xid(number: int, ago_s: float) -> str:
    us = int(1e6 * (time.clock_gettime(time.CLOCK_MONOTONIC) - ago_s))
    return f"3,907,{us},-;NVRM: Xid (PCI:0000:01:00): {number}, pid=1896, something\n"


def last(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_node_that_is_well_is_healthy(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--save-dirs", str(machine / "new" / "checkpoints"), "--memory", "8GB"]) == HEALTHY
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "healthy" and "not looked at" not in printed
    assert not (machine / "new").exists() and list((machine / "tmp").iterdir()) == [], "nothing stays"


SICK_BY: dict[str, tuple[Callable[[Path], object], str]] = {
    "memory": (
        lambda at: (at / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 1024 kB\n"),
        "memory: 1.0 MiB are available (MemTotal of this host: 4.0 GiB); expected 1.0 GiB",
    ),
    "memory of the container": (
        lambda at: container(at, 6 << 30, 11 << 29),
        "memory: 512.0 MiB are available (cgroups/pod/memory.max: 6.0 GiB); expected 1.0 GiB",
    ),
    "memory errors": (
        lambda at: (at / "edac" / "mc0" / "ue_count").write_text("2\n"),
        "memory errors: uncorrected errors: 2 of mc0; expected none since the node was started",
    ),
    "GPU memory": (
        lambda at: smi(at, "echo '0, 0, No'; echo '1, 4, No'"),
        "GPU 1: 4 uncorrected memory errors; expected none",
    ),
    "GPU rows": (lambda at: smi(at, "echo '0, 0, Yes'"), "GPU 0: memory rows could not be remapped; expected none"),
    "GPU lost": (
        lambda at: smi(at, "echo 'Unable to determine the device handle: GPU is lost' >&2; exit 15"),
        "GPUs: nvidia-smi ended with exit status 15: Unable to determine the device handle: GPU is lost; expected devices that answer",
    ),
    "Xid": (
        lambda at: (at / "kmsg").write_text(xid(13, 5) + xid(79, 60) + xid(31, 5)),
        "Xids: Xid 79 of PCI:0000:01:00; expected none",
    ),
}


@pytest.mark.parametrize("what", SICK_BY)
def test_what_makes_a_node_sick_is_the_last_line(machine: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    break_it, expected = SICK_BY[what]
    break_it(machine)
    assert main([]) == SICK
    assert last(capsys).replace(f"{machine}/", "") == expected


def test_a_driver_that_does_not_answer_makes_a_node_sick(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_check, "SMI_S", 0.3)
    smi(machine, "exec sleep 100")
    assert main([]) == SICK
    assert last(capsys) == "GPUs: nvidia-smi did not answer within 0.3 s; expected an answer"


def test_a_disk_that_takes_no_bytes_makes_a_node_sick(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    assert main(["--save-dirs", str(machine)]) == SICK
    assert f"directory {machine}" in (said := last(capsys)) and "Input/output error" in said


def test_an_error_of_yesterday_or_of_a_program_makes_no_node_sick(machine: Path) -> None:
    (machine / "kmsg").write_text(
        xid(79, health_check.RECENT_S + 60) + xid(43, 1) + "6,1,2,-;NVRM: Xid nonsense\ngarbage"
    )
    assert main([]) == HEALTHY


def test_what_cannot_be_looked_at_is_said_and_not_judged(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (machine / "edac" / "mc0" / "ue_count").unlink()
    for name in ("meminfo", "kmsg", "driver"):
        (machine / name).unlink()
    assert main(["--peer", "127.0.0.1:1"]) == HEALTHY
    printed = capsys.readouterr().out
    for said in ("no EDAC driver here", "does not say how much", "kernel's log cannot be read", "no NVIDIA driver"):
        assert said in printed
    assert "peer 127.0.0.1:1, clock: not looked at: does not answer: Connection refused" in printed


@pytest.mark.parametrize("meminfo", ["MemTotal: 16777216 kB\n", "no line of it\n"])
def test_memory_that_the_host_does_not_say_is_not_judged(
    machine: Path, capsys: pytest.CaptureFixture[str], meminfo: str
) -> None:
    (machine / "meminfo").write_text(meminfo)
    assert main([]) == HEALTHY
    assert "memory: not looked at: " in capsys.readouterr().out


def test_a_driver_without_these_fields_is_not_judged(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smi(machine, "echo 'Field \"remapped_rows.failure\" is not a valid field to query.'; exit 2")
    assert main([]) == HEALTHY
    assert "nvidia-smi is older than these checks" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "expected"), [(OK, HEALTHY), (WARNING, HEALTHY), (FAILED, SICK)])
def test_a_clock_makes_a_node_sick_where_doctor_says_failed(
    monkeypatch: pytest.MonkeyPatch, status: str, expected: int
) -> None:
    """What else differs between the nodes does not count."""
    found = [Finding("peer a:1, clock", status, "+301 s"), Finding("peer a:1, versions", FAILED, "other")]
    monkeypatch.setattr(two_nodes, "ask", lambda address: iter(found))
    assert main(["--peer", "a:1"]) == expected


@pytest.mark.parametrize("given", ["-1", "x", "nan", "1TB"])
def test_a_size_that_is_none_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--memory", given])
    assert caught.value.code == 2 and f"got {given!r}, expected gigabytes" in capsys.readouterr().err
