"""`metrics.jsonl`: one line a step, for machines; the one account of a job over all its restarts.

Owns the file's format. A step's line holds the exact bits (`loss`, `grad_norm`: float.hex) beside readable values. Lines with
an `event` mark a start or a resume: what stood before it for later steps was not kept and is trained again.

    {"event": "start", "from_step": 0, ...}
    {"step": 1, "loss": "0x1.62e4300000000p+2", "loss_value": 5.545177, "grad_norm": ..., "lr": [...], ...}
    {"event": "resume", "from_step": 1, "path": ".../iter_0000001", ...}
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.curves.board import StepPoints
from ttp.errors import ConfigError
from ttp.inputs import checked

log = logging.getLogger("ttp.trainer")

BLOCK = 1 << 16
"""Bytes that are read at once, from the end of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What is said about one step."""

    step: int
    epoch: int
    loss: float
    """Mean over the tokens of the step, over all ranks."""
    grad_norm: float
    """Before clipping."""
    learning_rates: tuple[float, ...]
    loss_scale: float
    skipped: bool
    """True when an overflow was found: the update changed nothing."""
    tokens: int | None = None
    """Tokens of the step over all ranks."""
    time_s: float | None = None
    """None when the line was written from a checkpoint's record."""
    consumed_samples: int
    """Sequences consumed by the job after this step."""

    def line(self, *, unix_s: float) -> dict[str, Any]:
        """Return the step's line as JSON values."""
        timed = self.time_s is not None and self.tokens is not None
        fields: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss.hex(),
            "loss_value": _readable(self.loss),
            "grad_norm": self.grad_norm.hex(),
            "grad_norm_value": _readable(self.grad_norm),
            "lr": list(self.learning_rates),
            "loss_scale": self.loss_scale,
            "skipped": self.skipped,
            "tokens_per_s": round(self.tokens / self.time_s, 1) if timed and self.time_s and self.tokens else None,
            "time_ms": None if self.time_s is None else round(self.time_s * 1e3, 3),
            "consumed_samples": self.consumed_samples,
            "unix_s": unix_s,
        }
        return fields if timed else {**fields, "recovered": True}

    def points(self) -> StepPoints:
        """Return what TensorBoard shows of the step."""
        return StepPoints(
            step=self.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            learning_rate=self.learning_rates[0],
            loss_scale=self.loss_scale,
            tokens=self.tokens,
            time_s=self.time_s,
        )

    def text(self) -> str:
        """Return the step's line for people (`info.log`)."""
        rates = "".join(f"{rate:.6e}," for rate in self.learning_rates)
        time_ms = "recovered" if self.time_s is None else f"{self.time_s * 1e3:.2f} ms"
        return (
            f"train: Epoch:{self.epoch}, Step:{self.step}, Loss: {round(self.loss, 6)}, Finite_grads: {not self.skipped},"
            f" Loss_scale: {self.loss_scale}, Learning_rate: ({rates}), Time: {time_ms}"
        )


class MetricsFile:
    """Appends lines to metrics.jsonl (rank 0 only). Each line is one write() straight to the kernel: a SIGKILL after it
    loses nothing. Raises ConfigError when the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            _cut_torn_line(path)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise ConfigError(f"training_config.output_dir: {path} cannot be written: {exc.strerror}") from None

    def append(self, fields: Mapping[str, Any]) -> None:
        """Write one line. A full disk is reported in the log and does not end the training."""
        body = (json.dumps(fields, allow_nan=False) + "\n").encode()
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, body) != len(body):
                os.ftruncate(self._fd, size)
                log.error("%s: the disk took half a line of step %s: left out", self._path, fields.get("step"))
        except OSError as exc:
            log.error("%s: no line for step %s: %s", self._path, fields.get("step"), exc)

    def resumed(self, from_step: int, fields: Mapping[str, Any], recovered: Mapping[str, Any] | None) -> bool:
        """Note a resume; where the account up to here lacks exactly the line of `from_step` (the job died between the update
        and the line), write `recovered` for it. Say whether that was done."""
        gap = lacks_only(self._path, from_step)
        self.append({"event": "resume", "from_step": from_step, **fields})
        if gap and recovered is not None:
            self.append(recovered)
        return gap and recovered is not None

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the file, oldest first (a line without its newline is still being written), without damaged ones."""
    if not path.exists():
        return []
    content = path.read_bytes()
    return list(_undamaged(path, content[: content.rfind(b"\n") + 1].split(b"\n")))


def account(lines: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the line of each step that counts: a start or resume drops the steps after it."""
    steps: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if "event" in line:
            steps = {step: kept for step, kept in steps.items() if step <= line["from_step"]}
        else:
            steps[line["step"]] = line
    return steps


def lacks_only(path: Path, step: int) -> bool:
    """Say whether the account has all up to this step but this step's own line; one without any line has nothing to be completed. Reads from the
    end, and no more than it needs: a rank that takes a lost one's place must not wait for a file of a million lines."""
    known, upto = False, math.inf
    for line in _undamaged(path, _newest_first(path)):
        known = True
        if "event" in line:
            upto = min(upto, line["from_step"])
        elif line["step"] <= min(upto, step):
            return bool(line["step"] == step - 1)
    return known and step == 1


def _undamaged(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each line that is a step's or an event's. A disk or a power cut may have damaged others (blocks of zeros): they are
    passed over with one warning, because a job must not fail at each restart over an account."""
    warned = False
    for line in filter(None, lines):
        try:
            fields = checked.mapping(json.loads(line), "line")
            key = "from_step" if "event" in fields else "step"
            checked.integer(fields.get(key), key)
        except (ValueError, RecursionError) as exc:
            if not warned:
                log.warning(
                    "%s: passed over damaged lines; the first that was read is %s: %s", path, checked.shown(line), exc
                )
            warned = True
            continue
        yield fields


def _newest_first(path: Path) -> Iterator[bytes]:
    """Return the whole lines of the file, newest first."""
    with open(path, "rb") as file:
        end, rest, last = file.seek(0, os.SEEK_END), b"", True
        while end:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            if last and lines:
                lines.pop()  # without its newline it is still being written, or torn
                last = False
            yield from reversed(lines)
            end = begin
        if not last:
            yield rest


def _readable(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no nan; the hex beside it says which


def _cut_torn_line(path: Path) -> None:
    """Drop a last line that lacks its newline: its writer died in the middle of it."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            if newline := file.read(end - begin).rfind(b"\n") + 1:
                end = begin + newline
                break
            end = begin
        file.truncate(end)
