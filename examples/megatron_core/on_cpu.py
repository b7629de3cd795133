"""Lets Megatron-Core run on a CPU: it names CUDA as its device, and asks tensors whether they are CUDA's.

Owns that name alone; the code of Megatron-Core stays what it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what is made for CUDA, and has `tensor.type()` name CUDA's types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


def begin() -> None:
    """Let this process's training thread run on the CPU."""
    OnCpu().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = lambda device: None  # made, and used by overlapping communication alone
