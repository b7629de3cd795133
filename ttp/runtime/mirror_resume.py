"""The mirror as the ranks of an attempt see it: whether it has a newer whole checkpoint than the directories, which is fetched then.

Owns when it is asked (at a job's first start, and at a restart whose directories lack something), and what follows when it does not answer: with a checkpoint
in the directories a warning; without one a refusal, for a job that begins at step 1 by mistake loses more than one that does not begin. Rank 0 fetches
into its node's directory; the other ranks wait in short exchanges, so that no collective times out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ttp.checkpoint.find import step_of
from ttp.checkpoint.format.signature import VerifyKey
from ttp.checkpoint.reader import Reader
from ttp.config import Settings
from ttp.errors import CheckpointError
from ttp.exchange.json_collectives import exchange_json
from ttp.groups.vacancy import vacant
from ttp.mirror import fetch
from ttp.mirror.remote import Remote
from ttp.mirror.source import MirrorSource
from ttp.runtime.directory_agreement import JobDirectories
from ttp.runtime.rank_runtime import show
from ttp.text.wording import size_text

log = logging.getLogger("ttp")

_ANSWER_S = 1.0
"""Between two exchanges while rank 0 fetches."""
_PROGRESS_S = 10.0
"""Between two lines of progress."""
_TRIES = 3
"""Of each call to a store at a start: a job with checkpoints in its directories waits for them."""


class MirrorResume:
    """All ranks make one, and call `look` in the same order."""

    def __init__(
        self,
        settings: Settings,
        directories: JobDirectories,
        rank: int,
        device: torch.device,
        key: VerifyKey | None,
        kept: int | None,
    ) -> None:
        """`kept`: checkpoints that the job keeps; None: all. Raises ConfigError."""
        self._remote = Remote(settings.mirror, tries=_TRIES)
        self._settings = settings
        self._directories = directories
        self._rank = rank
        self._device = device
        self._key = key
        self._kept = kept or 0

    def tell_agent(self, passed_over: Mapping[str, int]) -> None:
        """Write for this node's agent what it copies (the rank that looks after the directories). `passed_over`: checkpoints, inode by path, that are
        not this run's, and are neither copied nor counted. A process in a lost one's place does so when it knows of them."""
        settings, keep = self._settings, self._settings.mirror_keep
        if not self._directories.keeps or vacant():
            return
        if not (settings.launched and settings.attempt_dir):
            if not passed_over:  # it was said at the start
                show(logging.WARNING, "TTP_MIRROR: nothing is mirrored without ttprun; resuming from the mirror works")
            return
        host = "" if settings.shared_dirs else settings.host
        used, most = tuple(self._directories.used), self._kept if keep < 0 else keep
        try:
            MirrorSource(used, host, most, dict(passed_over)).write(Path(settings.attempt_dir))
        except OSError as error:
            cost = "the mirror takes checkpoints of other runs for this one's" if passed_over else "nothing is mirrored"
            show(logging.WARNING, f"{cost}: {settings.attempt_dir} cannot be written: {error}")

    def look(
        self, choice: str, found: Reader | None, open_step: Callable[[int], Reader | None], *, passed_over: bool
    ) -> Reader | None:
        """Return `found`, or the mirror's newer checkpoint. `open_step`: opens what was fetched; None: it is not usable.

        passed_over: the directories have one that is not valid. Raises CheckpointError on every rank.
        """
        first = self._settings.round_number == 0
        asks = first or found is None or passed_over
        if not any(exchange_json(asks, self._device)):
            return found
        if choice != "auto":
            self._check_nothing_newer(choice, found, first)
            return found
        above, below = (found.manifest.step if found is not None else 0), None
        while True:
            answer = self._together(partial(self._fetch, above, below))
            if error := answer["error"]:
                return self._without(found, error)
            if answer["step"] is None:
                return found
            if (newer := open_step(answer["step"])) is not None:
                return newer
            below = answer["step"]

    def _without(self, found: Reader | None, error: str) -> Reader | None:
        """Go on with what the directories have."""
        if found is None and not self._settings.mirror_optional:
            raise CheckpointError(
                f"no checkpoint in {', '.join(self._directories.named)}, and none from the mirror: {error}. Make it reachable, or, to begin at"
                " step 1 all the same, set TTP_MIRROR_OPTIONAL=True or remove TTP_MIRROR"
            )
        if self._rank == 0:
            what = f"step {found.manifest.step}" if found is not None else "step 1"
            log.warning("the mirror is passed over, and the job goes on from %s: %s", what, error)
        return found

    def _check_nothing_newer(self, choice: str, found: Reader | None, first: bool) -> None:
        """A job that does not resume the newest checkpoint would mix its own with those of the mirror. Raises CheckpointError."""
        after = found.manifest.step if found is not None else 0
        answer = self._together(lambda: {"error": "", "step": max(fetch.steps_of(self._remote), default=0)})
        if first and not answer["error"] and answer["step"] > after:
            raise CheckpointError(
                f"resume is {choice!r}, but {self._remote.url} holds newer checkpoints (the newest: of step {answer['step']}), which this run's"
                " would be mixed up with; resume 'auto', or use another TTP_MIRROR"
            )
        if answer["error"] and self._rank == 0:
            log.warning("the mirror does not answer: %s", answer["error"])

    def _fetch(self, above: int, below: int | None) -> dict[str, Any]:
        """Rank 0's work."""
        skipped: list[str] = []

        def skip(url: str, reason: str) -> None:
            skipped.append(reason)
            log.warning("skipping checkpoint %s: %s", url, reason)

        shown_s = begun_s = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal shown_s
            if (now_s := time.monotonic()) - shown_s >= _PROGRESS_S:
                shown_s = now_s
                log.info("fetching from the mirror: %s of %s", size_text(done), size_text(total))

        directory = Path(self._directories.serving[0])
        path = fetch.fetch_newest(
            self._remote, directory, above=above, below=below, key=self._key, on_skip=skip, progress=progress
        )
        if path is not None:
            log.info("fetched %s from %s in %.1f s", path, self._remote.url, time.monotonic() - begun_s)
            return {"error": "", "step": step_of(path)}
        return {"error": skipped[0] if skipped and not above else "", "step": None}

    def _together(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Have rank 0 do it, and return its answer on every rank."""
        answers: list[dict[str, Any]] = []

        def run() -> None:
            try:
                answers.append(work())
            except Exception as error:  # of any kind: the other ranks wait for an answer
                answers.append({"error": str(error) or type(error).__name__, "step": None})

        thread = threading.Thread(target=run, name="ttp-mirror", daemon=True)
        if self._rank == 0:
            thread.start()
        while True:
            if self._rank == 0:
                thread.join(_ANSWER_S)
            answer: dict[str, Any] | None = exchange_json(answers[0] if answers else None, self._device)[0]
            if answer is not None:
                return answer
