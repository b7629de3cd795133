"""`ttp_to_persist`: the decorator that keeps a rank alive at the end of `train` until its state is safe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ttp.exchange import error_file

P = ParamSpec("P")
R = TypeVar("R")


def ttp_to_persist(train: Callable[P, R]) -> Callable[P, R]:
    """Protect `train`, the function that holds the training loop (every rank calls it).

    - It raises: the rank reports it to the controller, stays as a holder of its shards until the dying-gasp checkpoint is
      published or refused, and the exception goes on (or the process ends with status 75, when a peer was the cause).
    - It returns: the rank stays as a holder until every rank has returned, so that a fault in somebody's last step
      still finds all replicas.
    - `ENABLE_TTP=False`, or no session was started: `train` runs as it is.

    The session may be started before the call or inside `train`. Under a launcher, an exception that ends this process is
    recorded from here on (`ttp.exchange.error_file`).
    """
    error_file.install()

    @functools.wraps(train)
    def persistent(*args: P.args, **kwargs: P.kwargs) -> R:
        from ttp.session import find_session

        session = find_session()
        if session is not None:
            session.begin_train()
        try:
            result = train(*args, **kwargs)
        except BaseException as exc:
            session = find_session()
            if session is not None:
                session.hold_after(exc)
            raise
        session = find_session()
        if session is not None:
            session.hold_until_all_finish()
        return result

    return persistent
