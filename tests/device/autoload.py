"""A folder that makes torch load the device by itself, in any process that has it on its PYTHONPATH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.device.backend import TRAITS

_ROOT = Path(__file__).parents[2]


REGISTER = "tests.device.backend:register"


def autoloading(folder: Path, environ: Mapping[str, str], entry: str = REGISTER, /, **traits: int) -> dict[str, str]:
    """Write a distribution with the entry point into `folder`; return `environ` with it, and with the device's traits. entry: what torch calls."""
    described = folder / "sim_device-1.0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: sim-device\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[torch.backends]\nsim = {entry}\n")
    path = ":".join(filter(None, (str(folder), str(_ROOT), environ.get("PYTHONPATH"))))
    return {
        **environ,
        "PYTHONPATH": path,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        TRAITS: ",".join(f"{name}={value}" for name, value in traits.items()),
    }
