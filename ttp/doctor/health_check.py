"""Is this node fit for ranks, now? What `--health-check builtin` of ttprun runs; also `python -m ttp.doctor.health_check`.

Looks for what breaks while a job runs: disks, memory, clocks, NVIDIA's devices. The same findings as `ttp doctor`'s, within a second or so. A warning
does not make a node sick, and what cannot be looked at is not judged. The last line that is printed says what has failed. Owns the choice of the checks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttp.copies.node_limits import CGROUPS, PROC, memory_limits
from ttp.doctor import two_nodes
from ttp.doctor.finding import FAILED, OK, Finding, judged
from ttp.doctor.save_directories import check_briefly
from ttp.launch.health.builtin_options import parse_builtin
from ttp.text.wording import size_text

HEALTHY, SICK = 0, 1
EDAC = Path("/sys/devices/system/edac/mc")
"""The kernel's counters of memory errors, where it has a driver for the memory controller."""
KERNEL_LOG = Path("/dev/kmsg")
DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_SMI = "nvidia-smi"
SMI_S = 20.0
"""How long nvidia-smi may take. A device that has fallen off the bus can hang it; it is slow where persistence mode is off."""
RECENT_S = 3600.0
"""A device's error in the kernel's log is looked at for so long: the log keeps those that a reset has mended."""
XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})
"""Xids by which NVIDIA's catalog has the device or the node looked at. Others are a program's (13, 31, 43, 45), or are contained and mended."""
_XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)")
_QUERY = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.failure")


def main(argv: Sequence[str] | None = None) -> int:
    """Print each finding; return the exit status."""
    given = parse_builtin(argv)
    failed: list[str] = []
    for each in check(given):
        text = f"{each.name}: {each.found}" + (f"; expected {each.expected}" if each.expected else "")
        print(f"{each.status:<7} {text}", flush=True)
        failed += [text] if each.status == FAILED else []
    print("; ".join(failed) or "healthy", flush=True)
    return SICK if failed else HEALTHY


def check(given: argparse.Namespace) -> Iterator[Finding]:
    """Yield what is found."""
    for directory in dict.fromkeys((*given.save_dirs, Path(tempfile.gettempdir()))):
        yield from check_briefly(directory)
    yield memory(given.memory)
    yield memory_errors()
    if given.peer is not None:
        yield from clock(given.peer)
    yield from gpus()
    yield xids()


def memory(needed: int) -> Finding:
    """Look at the memory that is available beside what runs now: the host's, and what cgroups allow."""
    try:
        least = min(memory_limits(PROC, CGROUPS), key=lambda one: one.available)
    except (OSError, LookupError, ValueError):
        return _skipped("memory", f"{PROC}/meminfo does not say how much is available")
    found = f"{size_text(least.available)} are available ({least.source}: {size_text(least.total)})"
    return judged("memory", least.available >= needed, found, size_text(needed), "End what else runs on this node, or give its container more",
                  bad=FAILED, available_bytes=least.available)  # fmt: skip


def memory_errors() -> Finding:
    """Look at the errors that the memory could not correct since the node was started."""
    counters = sorted(EDAC.glob("mc*/ue_count"))
    try:
        counts = {path.parent.name: int(path.read_text()) for path in counters}
    except (OSError, ValueError) as error:
        return _skipped("memory errors", f"the counters in {EDAC} cannot be read ({error})")
    if not counts:
        return _skipped("memory errors", f"no counters in {EDAC}: the kernel has no EDAC driver here")
    bad = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
    return judged("memory errors", not bad, f"uncorrected errors: {bad or 'none'}", "none since the node was started",
                  "Replace the memory module", bad=FAILED)  # fmt: skip


def clock(peer: str) -> Iterator[Finding]:
    """Compare the clocks. A peer that does not answer makes this node not sick."""
    for each in two_nodes.ask(peer):
        if each.name.endswith(", clock"):
            yield each
        elif each.name == f"peer {peer}":
            yield _skipped(f"peer {peer}, clock", each.found)


def gpus() -> Iterator[Finding]:
    """Ask NVIDIA's driver for errors that the devices' memory could not correct, since the driver was loaded."""
    if not DRIVER.exists() or (program := shutil.which(NVIDIA_SMI)) is None:
        yield _skipped("GPUs", f"{NVIDIA_SMI} is not there" if DRIVER.exists() else "no NVIDIA driver")
        return
    do = "Reset the device or restart the node; replace the device where it comes again"
    query = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=SMI_S)
    except subprocess.TimeoutExpired:
        yield Finding("GPUs", FAILED, f"{NVIDIA_SMI} did not answer within {SMI_S:g} s", "an answer", do)
        return
    except OSError as error:
        yield _skipped("GPUs", f"{NVIDIA_SMI} cannot be started: {error.strerror or error}")
        return
    if answer.returncode:
        said = next((line for line in reversed((answer.stdout + answer.stderr).splitlines()) if line.strip()), "")
        if "not a valid field" in said:
            yield _skipped("GPUs", f"{NVIDIA_SMI} is older than these checks: {said.strip()}")
            return
        found = f"{NVIDIA_SMI} ended with exit status {answer.returncode}: {said.strip()[:200]}"
        yield Finding("GPUs", FAILED, found, "devices that answer", do)
        return
    for line in answer.stdout.splitlines():
        index, *values = [value.strip() for value in line.split(",")]
        if len(values) != len(_QUERY) - 1:
            continue
        errors, remapping = values
        trouble = [f"{errors} uncorrected memory errors"] if errors.isdecimal() and int(errors) else []
        trouble += ["memory rows could not be remapped"] if remapping in ("Yes", "1") else []
        yield judged(f"GPU {index}", not trouble, " and ".join(trouble) or "no uncorrected memory errors", "none", do,
                     bad=FAILED)  # fmt: skip


def xids() -> Finding:
    """Look in the kernel's log for the driver's newest reports of broken devices."""
    try:
        log = _kernel_log()
    except OSError as error:
        return _skipped("Xids", f"the kernel's log cannot be read ({error.strerror or error})")
    found = ""
    since_us = 1e6 * (time.clock_gettime(time.CLOCK_MONOTONIC) - RECENT_S)
    for line in log.splitlines():
        head, _, text = line.partition(";")  # priority,sequence,microseconds,flags;text
        match = _XID.search(text)
        if match is None or int(match["number"]) not in XIDS:
            continue
        when = head.split(",")[2:3]
        if when and when[0].isdecimal() and int(when[0]) >= since_us:
            found = f"Xid {match['number']} of {match['device']}"
    return judged("Xids", not found, found or "none of a broken device within the last hour", "none",
                  "Reset the device or restart the node", bad=FAILED)  # fmt: skip


def _kernel_log() -> str:
    """Return the kernel's log. Raises OSError."""
    if not KERNEL_LOG.is_char_device():
        return KERNEL_LOG.read_text(errors="replace")
    device, parts = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK), []
    try:
        while True:
            try:
                parts.append(os.read(device, 8192))  # one record
            except BlockingIOError:
                return b"".join(parts).decode(errors="replace")
            except BrokenPipeError:
                continue  # records were overwritten meanwhile
    finally:
        os.close(device)


def _skipped(name: str, why: str) -> Finding:
    return Finding(name, OK, f"not looked at: {why}")


if __name__ == "__main__":
    sys.exit(main())
