"""A rank's side of its copies: the memory that its agent gives it, and what the keeper answers.

Training stops for `take` alone, and in `wait` when the last copy is not safe yet. A keeper that is lost costs safety, and never a step: the next one
is asked for memory when a copy is due.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from ttp.copies.region import Description, Region, data_bytes, region_bytes
from ttp.errors import ConfigError
from ttp.fork_server import frames
from ttp.identity.own import socket_name

START_S = 120.0
"""A keeper may have to import torch first."""
OOM_SCORE = 200
"""When memory runs out the kernel is to end a rank rather than the agent, which has what can be saved of it."""


class CopyMemory:
    """One rank's. Used by the training thread."""

    def __init__(self, address: str, description: Description, use: str = "copies") -> None:
        """`address`: the agent's socket (TTP_COPIES). `use`: `copies`, or `save`. Raises ConfigError: the node has no memory for it."""
        self._address = address
        self._use = use
        self._description = description
        self._channel: socket.socket | None = None
        self._region: Region | None = None
        self._open()

    def _open(self) -> None:
        size, written = region_bytes(self._description.slots), data_bytes(self._description.slots)
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.settimeout(START_S)
            channel.connect(socket_name(self._address))
            frames.send(channel, {"rank": self._description.rank, "use": self._use, "nbytes": size, "written": written})
            answer, descriptors = frames.receive(channel)
            if "error" in answer:
                raise ConfigError(
                    f"copies in memory: got {answer['error']}. Give the node more memory, shard the state over more ranks, or do without"
                    " copies"
                )
            with open(descriptors[0], "r+b", buffering=0) as file:
                region = Region(memoryview(mmap.mmap(file.fileno(), size)))
            region.describe(self._description)
            frames.send(channel, {"do": "described"})
        except BaseException:
            channel.close()
            raise
        self._channel, self._region = channel, region

    def take(self, slot: int, step: int, sequence: int, state: bytes, tensors: Sequence[torch.Tensor]) -> float:
        """Copy a step into a slot; return the seconds that took. Raises CheckpointError, OSError: there is no memory any more."""
        if self._channel is None:
            self._open()
        assert self._region is not None
        begun = time.monotonic()
        self._region.write(slot, step, sequence, state, tensors)
        return time.monotonic() - begun

    def say(self, message: dict[str, Any]) -> None:
        """Tell the keeper. Raises OSError."""
        if self._channel is None:
            raise OSError("there is no copy keeper")
        try:
            frames.send(self._channel, message)
        except OSError as error:
            self.close()
            raise OSError(f"the copy keeper was lost: {error}") from error

    def next_message(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the keeper's next message; None: there was none in time. Raises OSError: there will be none."""
        if self._channel is None:
            raise OSError("there is no copy keeper")
        if not frames.readable(self._channel, timeout_s):
            return None
        try:
            return frames.receive(self._channel)[0]
        except (EOFError, OSError) as error:
            self.close()
            raise OSError(f"the copy keeper was lost: {error}") from error

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None


def be_ended_first() -> None:
    """Have the kernel end this process before its agent when memory runs out."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(min(1000, score + OOM_SCORE)))
