"""A process of its own that says which device this is, and whether its streams and events behave as TTP relies on.

Its argument is the device's name. Prints one line of JSON: `device` (what it is), `checks` (see `report.py`). Exit status 2 where there is no such device. The self-test itself
never touches a device.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ttp.errors import ConfigError
from ttp.selftest.long_kernel import LongKernel
from ttp.selftest.report import FAILED, NOT_APPLICABLE, PASSED, Check
from ttp.trainer.devices.binding import bind, choose_device
from ttp.trainer.devices.device_table import DEVICES, PLUGIN, DeviceKind

BUSY_S = 3.0
"""How long the kernel takes that the rest must not wait for."""
_DRIVERS = ("/proc/driver/nvidia/version", "/usr/local/Ascend/driver/version.info", "/sys/module/xe/srcversion", "/sys/module/i915/srcversion",
            "/sys/module/mtgpu/version", "/sys/module/amdgpu/version")  # fmt: skip
STREAMS = "streams and events"


def main(argv: list[str]) -> int:
    """Print what was found; return the exit status."""
    try:
        kind = kind_of(argv[0])
        device = bind(kind, 0, "--device")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    check = (
        Check(STREAMS, NOT_APPLICABLE, "the CPU has none: what was launched is done")
        if kind.is_host
        else streams(device)
    )
    print(json.dumps({"device": describe(kind, device), "torch": str(torch.__version__), "checks": [asdict(check)]}))
    return 0


def kind_of(name: str) -> DeviceKind:
    """Return the device called `name`: one of the trainer's, `auto`, or what a plug-in calls its own. Raises ConfigError: there is none."""
    own = torch._C._get_privateuse1_backend_name()  # torch has no public name for it
    return choose_device(PLUGIN if name == own and name not in DEVICES else name, "--device")


def describe(kind: DeviceKind, device: torch.device) -> dict[str, Any]:
    """Return the device's name, driver and number, and how the trainer is to be asked for it."""
    found: dict[str, Any] = {
        "type": kind.name,
        "name": platform.processor() or platform.machine(),
        "backend": kind.backend,
        "driver": f"{platform.system()} {platform.release().partition('-')[0]}",
        "count": 0,
        "trainer_device": kind.name if kind.name in DEVICES else PLUGIN,
    }
    if kind.is_host:
        return found
    module: Any = torch.get_device_module(device)
    named = getattr(module, "get_device_name", None)
    plugin = sys.modules.get(kind.plugin or "")
    driver = next((text for path in _DRIVERS if (text := _first_line(Path(path)))), "unknown")
    return {
        **found,
        "name": named(device) if named is not None else f"{kind.name} (no name)",
        "driver": driver,
        "runtime": torch.version.cuda or torch.version.hip or getattr(plugin, "__version__", None) or "unknown",
        "count": module.device_count(),
    }


def _first_line(path: Path) -> str:
    try:
        line = (path.read_text(errors="replace").splitlines() or [""])[0]
        return " ".join(line.partition("Release Build")[0].removeprefix("NVRM version:").split())
    except OSError:
        return ""


def streams(device: torch.device) -> Check:
    """Look at one thing after the other, while a kernel runs that nothing may wait for."""
    figures: dict[str, Any] = {}
    try:
        wrong = [what for what, holds in _claims(device, figures) if not holds]
    except RuntimeError as error:
        return Check(STREAMS, FAILED, f"the device raised: {error}", figures)
    if wrong:
        return Check(STREAMS, FAILED, f"expected, and not so: {'; '.join(wrong)}", figures)
    return Check(
        STREAMS,
        PASSED,
        "copies and events of other streams pass a kernel that runs, and nothing passes it in its own",
        figures,
    )


def _claims(device: torch.device, figures: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    module: Any = torch.get_device_module(device)
    kernel = LongKernel(device)
    x, side, waiting = torch.ones(1 << 16, device=device), module.Stream(device=device), module.Stream(device=device)
    host, late = (torch.zeros(1 << 16, pin_memory=True) for _ in range(2))
    current = module.current_stream(device)

    def copy(stream: Any, into: torch.Tensor) -> Any:
        with module.stream(stream):
            into.copy_(x, non_blocking=True)
            done = module.Event()
            done.record(stream)
        return done

    x.add_(0)  # what the device loads at a first use is loaded now
    copy(side, host).synchronize()
    host.zero_()
    module.synchronize()

    began = time.perf_counter()
    running = kernel.start(BUSY_S)
    x.add_(1)  # behind the kernel: with one hardware queue all that comes later is behind this
    launched_s = time.perf_counter() - began
    figures["launch_ms"] = round(1e3 * launched_s, 2)
    yield "a launch returns while the kernel runs", launched_s < BUSY_S / 2
    yield "an event behind the kernel is not done", not running.query()
    done = copy(side, host)
    waiting.wait_event(running)
    behind = copy(waiting, late)
    yield (
        "a copy on a stream of its own ends while the kernel runs",
        _within(BUSY_S / 2, done.query) and not running.query(),
    )
    figures["copy_ms"] = round(1e3 * (time.perf_counter() - began - launched_s), 2)
    yield "that copy reads what was there before the kernel", bool((host == 1).all())
    yield "a copy that waits for the kernel's event is not done before it", not behind.query() or running.query()
    running.synchronize()
    figures["kernel_s"] = round(time.perf_counter() - began, 2)
    yield "waiting for an event waits for the kernel", time.perf_counter() - began > BUSY_S / 4
    behind.synchronize()
    current.synchronize()
    yield "all is done in the end", bool(running.query() and behind.query() and (x.cpu() == 2).all())


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
