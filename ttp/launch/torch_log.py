"""Corrects torch's log line about failed workers: torch names the lowest failed rank instead of the root cause.

torch reads all exit statuses at one moment, after the hold, and logs `failed (exitcode: 75) local_rank: 0 ...` for the lowest rank, though
another was killed. Owns that line: it is kept, and logged again with the root cause. It is recognized by its text; a torch with another text
logs it unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LOGGER = "torch.distributed.elastic.multiprocessing.api"
_LINE = "failed (exitcode: %s) local_rank: %s (pid: %s)"


class EndLine(logging.Filter):
    """Keeps torch's line about the first failure until the root cause is known."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: logging.LogRecord | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if not (isinstance(record.msg, str) and record.msg.startswith(_LINE) and isinstance(record.args, tuple)):
            return True
        self._kept = record
        return False

    def write(self, root: ProcessFailure) -> None:
        """Log the kept line, if there was one, about this failure."""
        record, self._kept = self._kept, None
        if record is not None and isinstance(record.args, tuple):
            record.args = (root.exitcode, root.local_rank, root.pid, *record.args[3:])
            logging.getLogger(LOGGER).handle(record)


@contextmanager
def end_line_kept() -> Iterator[EndLine]:
    """Keep torch's end line back while its agent reads the exit statuses."""
    line, logger = EndLine(), logging.getLogger(LOGGER)
    logger.addFilter(line)
    try:
        yield line
    finally:
        logger.removeFilter(line)
