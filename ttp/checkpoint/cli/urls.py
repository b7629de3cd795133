"""`ttp ckpt` on URLs: list, inspect and verify look at them where they are; diff and export fetch the one that they read.

Owns the temporary directories that stand for URLs, and the URLs in their place in what is shown. `prune` and `sign` change directories only: what a mirror
keeps, the job's TTP_MIRROR_KEEP says, and a checkpoint is signed before it is copied.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from ttp.checkpoint.cli.output import Answer, Status, UsageError
from ttp.checkpoint.cli.verify import key_given, progress_of
from ttp.checkpoint.format.durable import step_directory_name
from ttp.errors import CheckpointError, ConfigError
from ttp.mirror import fetch, view
from ttp.mirror.url import is_url

Run = Callable[[argparse.Namespace, Console], Answer]
_FETCH = ("diff", "export")
_INSTEAD = {
    "prune": "Set TTP_MIRROR_KEEP of the job: it says how many its mirror keeps",
    "sign": "Sign the checkpoint in its directory, or give ttprun --sign-key",
}


def run_on_urls(run: Run, given: argparse.Namespace, console: Console) -> Answer:
    """Run a command with directories in the place of its URLs. Raises UsageError, TTPError, OSError."""
    if given.command not in ("list", "inspect", "verify", *_FETCH):
        raise UsageError(
            f"invalid path: got a URL, expected directories for {given.command}: it changes files in place. {_INSTEAD.get(given.command, '')}".rstrip()
        )
    with view.folder_of_views() as root:
        urls: dict[str, str] = {}
        try:
            for number, argument in enumerate(("path", "a", "b")):
                named = getattr(given, argument, None)
                if isinstance(named, str) and is_url(named):
                    below = root / str(number)
                    setattr(given, argument, _stand_in(given, named, below, console))
                    urls[str(below)] = view.open_url(named)[0].url
            return _with_urls(run(given, console), urls)
        except ConfigError as error:
            raise UsageError(str(error)) from None
        except CheckpointError as error:
            failed = Status.NO if given.command in ("list", "inspect", "verify") else Status.FAILED
            text = _replaced(str(error), urls)
            return Answer(failed, {"error": text}, [f"[red]ttp ckpt {given.command}:[/] {escape(text)}"])


def _stand_in(given: argparse.Namespace, url: str, below: Path, console: Console) -> Path:
    """Make the directory that stands for a URL: of one checkpoint, or of a folder of them."""
    remote, step = view.open_url(url)
    below.mkdir()
    steps = view.steps_at(remote, step)
    if given.command in _FETCH:
        with progress_of(console, "fetching") as progress:
            above, upto = (0, None) if step is None else (step - 1, step + 1)
            key = key_given(given)
            path = fetch.fetch_newest(
                remote,
                below,
                above=above,
                below=upto,
                key=key,
                progress=progress,
                on_skip=lambda url, reason: console.print(f"skipped: {reason}", markup=False),
            )
        if path is None:
            raise CheckpointError(f"{url} holds no valid checkpoint")
        return path
    chosen = steps if given.command != "inspect" else steps[:1]
    for each in chosen:
        view.make(remote, each, below, tables=given.command == "inspect")
    return below if step is None else below / step_directory_name(step)


def _replaced(text: str, urls: Mapping[str, str]) -> str:
    for directory, url in urls.items():
        text = text.replace(directory, url)
    return text


def _with_urls(answer: Answer, urls: Mapping[str, str]) -> Answer:
    """Return an answer that names URLs where it names their directories."""

    def said(item: RenderableType) -> RenderableType:
        if isinstance(item, Table):
            item.title = _replaced(str(item.title), urls) if item.title else item.title
            for column in item.columns:
                column._cells = [_replaced(cell, urls) if isinstance(cell, str) else cell for cell in column._cells]
            return item
        return _replaced(item, urls) if isinstance(item, str) else item

    fields: dict[str, Any] = json.loads(_replaced(json.dumps(answer.fields), urls))
    return Answer(answer.status, fields, [said(item) for item in answer.shown])
