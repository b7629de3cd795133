"""Calls that may hang for good, on a thread of their own: a store behind a pulled cable never answers.

Never ends such a call: it is left to itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """A call on a thread of its own, which is left to itself when it hangs."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._over = threading.Event()
        self._value: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="ttp-rendezvous", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except Exception as error:
            self._error = error
        self._over.set()

    def wait(self, timeout_s: float) -> bool:
        return self._over.wait(timeout_s)

    @property
    def succeeded(self) -> bool:
        return self._over.is_set() and self._error is None

    def result(self) -> T:
        """Return what the call returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]
