"""The devices this trainer knows: one table.

Owns every name of a device, its torch plug-in and its collective backend; nothing else in the trainer names one. A new device is
a new row. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

HOST = "cpu"
PLUGIN = "plugin"
"""Stands for the device that a plug-in has brought to torch by itself, when torch was imported (torch's entry points `torch.backends`): its own
name and its backend are torch's to say."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    name: str
    """torch's device type."""
    backend: str
    """Collective backend of tensors on it."""
    plugin: str | None = None
    """Module that brings the device to torch; None: torch has it."""
    host_variable: str | None = None
    """The variable by which its backend knows ranks of one host. NCCL refuses two ranks on one device of one host."""

    @property
    def is_host(self) -> bool:
        return self.name == HOST

    @property
    def backends(self) -> str:
        """Backends of the process group: the host's, and the device's own."""
        return self.backend if self.is_host else f"{HOST}:gloo,{self.name}:{self.backend}"


DEVICES = {
    kind.name: kind
    for kind in (
        DeviceKind("cuda", "nccl", host_variable="NCCL_HOSTID"),
        DeviceKind("xpu", "xccl"),
        DeviceKind("npu", "hccl", plugin="torch_npu"),
        DeviceKind("musa", "mccl", plugin="torch_musa"),
        DeviceKind(PLUGIN, ""),
        DeviceKind(HOST, "gloo"),
    )
}
"""In the order that `auto` tries them."""

if TYPE_CHECKING:
    DeviceName = str
else:
    DeviceName = Literal["auto", *DEVICES]
"""What `training_config.device` and `--device` take."""

MINDSPORE_NAMES = {"Ascend": "npu", "GPU": "cuda", "CPU": "cpu"}
"""The names here of MindSpore's `device_target`."""
