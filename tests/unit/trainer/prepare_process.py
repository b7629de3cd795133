"""A process that prepares a text and stops in the middle until it is ordered to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttp.trainer.data import prepare, text_cache
from ttp.trainer.data.tokenizer import Bytes


def prepare_slowly(text: Path, cache: Path, begun: Any, waits: Any, go: Any, answers: Any) -> None:
    """Set `waits` where another one prepares, and `begun` where the work has begun; wait for `go`, and put the fingerprint into `answers`."""
    write, share_in = prepare.write_tokens, text_cache._share_in

    def waiting(path: Path) -> float:
        waits.set()
        return share_in(path)

    def slow(prefix: Path, *rest: Any) -> int:
        (prefix.parent / "half").write_text("")
        begun.set()
        go.wait(250)
        (prefix.parent / "half").unlink()
        return write(prefix, *rest)

    prepare.write_tokens = slow  # type: ignore[assignment]
    text_cache._share_in = waiting
    answers.put(text_cache.prepared(text, Bytes(), cache, "text").fingerprint())
