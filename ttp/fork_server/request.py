"""Has a process forked by a server that listens, on behalf of a process that is not its agent."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from ttp.fork_server import frames
from ttp.fork_server.forked_process import ForkedOrphan

ANSWER_S = 5.0


class NotForked(Exception):
    """A process cannot be forked; its text is the reason."""


def fork_at(
    address: str, argv: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int], folder: str = "/"
) -> ForkedOrphan:
    """Fork `python -P -m module ...` in a session of its own. Raises NotForked.

    address: the server's socket. argv: interpreter, `-P`, `-m`, module, arguments. descriptors: what it gets as 0, 1 and 2.
    """
    program = {"argv": list(argv), "environ": dict(environ)}
    request = {"kind": "fork", "adopted": False, "folder": folder, "programs": [program]}
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(ANSWER_S)
            channel.connect(address)
            frames.send(channel, request, descriptors)
            answer, _ = frames.receive(channel)
        if answer["error"]:
            raise NotForked(answer["error"])
        return ForkedOrphan(answer["pids"][0], argv)
    except (EOFError, OSError, AttributeError) as error:  # the last one: no pidfd_open here
        raise NotForked(f"the fork server at {os.path.basename(address)} did not fork: {error}") from error
