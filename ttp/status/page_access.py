"""How one comes to a job's status page: where it is, its token, and the links and cookies that are made of the token.

Owns the files `status_page.json` and `status_token` beside the journals, and what each proof looks like: the token itself for programs, a link
that lets a browser in once, and the cookie that the browser gets for it. A link is good for one page's process, for LINK_S. Never logs a token.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from ttp import files
from ttp.config import FILE_MODE, status_token_file
from ttp.identity.secret import Secret, from_file
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

PLACE_NAME, TOKEN_NAME = "status_page.json", "status_token"
VARIABLE = "TTP_STATUS_TOKEN_FILE"
LINK_S = 300.0
"""A link that lets a browser in is good for so long."""
COOKIE_S = 86_400.0
_MOST_PLACE = 1 << 16
_MOST_PROOF = 200


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Where a page is served."""

    url: str
    """`http://host:port/` on this node's loopback, else `https://host:port/`."""
    host: str
    pid: int
    started: str
    """Names the page's process: a link is good for one."""
    token_file: str
    fingerprint: str = ""
    """SHA-256 of the certificate of an https page that made its own."""


def write(log_dir: Path, place: PagePlace) -> None:
    """Raises OSError."""
    files.replace(log_dir / PLACE_NAME, json.dumps(asdict(place)))


def read(log_dir: Path) -> PagePlace | None:
    """Return where a job's page is served; None: nowhere that is known here, or its process on this node has ended."""
    try:
        fields = checked.mapping(read_json(log_dir / PLACE_NAME, _MOST_PLACE), "page")
        texts = {
            name: checked.string(*checked.field(fields, name, ""))
            for name in ("url", "host", "started", "token_file", "fingerprint")
        }
        place = PagePlace(pid=checked.integer(*checked.field(fields, "pid", "")), **texts)
    except (OSError, ValueError):
        return None
    gone = place.host == os.uname().nodename and not os.path.exists(f"/proc/{place.pid}")
    return None if gone else place


def token_path(log_dir: Path) -> Path:
    """Return the file of this job's token: the one that is named, else its own, which is made where it is not there. Raises OSError, ConfigError."""
    if named := status_token_file():
        return Path(named)
    path = log_dir / TOKEN_NAME
    if not path.exists():
        unfinished = path.with_name(f".{TOKEN_NAME}.{secrets.token_hex(4)}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            with open(descriptor, "w") as file:
                file.write(f"{secrets.token_hex(32)}\n")
            with suppress(FileExistsError):  # another one was faster
                os.link(unfinished, path)
        finally:
            unfinished.unlink()
    return path


def read_token(path: Path) -> Secret:
    """Raises ConfigError: it cannot be read, is too short, or other users can read it."""
    return from_file(path, VARIABLE, "page token")


def login_link(place: PagePlace, unix_s: float) -> str:
    """Return a link that lets one browser in, once. Raises ConfigError: the token cannot be read here."""
    key = _key(read_token(Path(place.token_file)), f"link {place.started}")
    return f"{place.url}login?once={quote(_signed(key, f'{unix_s + LINK_S:.0f}.{secrets.token_hex(8)}'))}"


class Access:
    """What lets one in. From any thread."""

    def __init__(self, token: Secret, started: str, clock: Callable[[], float]) -> None:
        """`clock`: seconds since 1970."""
        self._token = token
        self._link_key = _key(token, f"link {started}")
        self._cookie_key = _key(token, "cookie")
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}  # guarded by the lock
        """Links that have let one in, with the end of their time."""

    def takes_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self._token.value)

    def takes_link(self, once: str) -> bool:
        """Say whether this link lets one in: it does so once."""
        end = self._end_of(self._link_key, once)
        if end is None:
            return False
        with self._lock:
            self._used = {link: until for link, until in self._used.items() if until > self._clock()}
            new = once not in self._used
            self._used[once] = end
        return new

    def cookie(self) -> str:
        return _signed(self._cookie_key, f"{self._clock() + COOKIE_S:.0f}")

    def takes_cookie(self, text: str) -> bool:
        return self._end_of(self._cookie_key, text) is not None

    def _end_of(self, key: bytes, text: str) -> float | None:
        """Return until when a proof is good; None: it is not."""
        body, _, code = text.rpartition(".")
        if len(text) > _MOST_PROOF or not hmac.compare_digest(code.encode(errors="replace"), _code(key, body).encode()):
            return None
        end = float(body.partition(".")[0])
        return end if end > self._clock() else None


def _key(token: Secret, purpose: str) -> bytes:
    return token.key(f"status page {purpose}")


def _signed(key: bytes, body: str) -> str:
    return f"{body}.{_code(key, body)}"


def _code(key: bytes, body: str) -> str:
    return hmac.digest(key, body.encode(errors="replace"), "sha256").hex()
