"""A process that prepares a text and stops in the middle until it is ordered to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttp.trainer.data import prepare, text_cache
from ttp.trainer.data.tokenizer import Bytes


def prepare_slowly(text: Path, cache: Path, begun: Any, go: Any, answers: Any) -> None:
    """Say in `begun` that the work has begun, wait for `go`, and put the fingerprint into `answers`."""
    write = prepare.write_tokens

    def slow(prefix: Path, *rest: Any) -> int:
        (prefix.parent / "half").write_text("")
        begun.set()
        go.wait(250)
        (prefix.parent / "half").unlink()
        return write(prefix, *rest)

    prepare.write_tokens = slow  # type: ignore[assignment]
    answers.put(text_cache.prepared(text, Bytes(), cache, "text").fingerprint())
