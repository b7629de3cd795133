"""Which URLs name a mirror: checked before anything starts, and without a connection.

Owns the refusals, in which no password is quoted.
"""

from __future__ import annotations

import importlib.util
import re

from ttp.errors import ConfigError
from ttp.inputs import checked

S3 = ("s3", "s3a")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(text: str) -> bool:
    """Tell a URL from a path."""
    return _URL.match(text) is not None


def check_url(url: str, name: str = "TTP_MIRROR") -> str:
    """Return a URL that can be mirrored to. Raises ConfigError, which quotes no password."""
    match = _URL.fullmatch(url)
    if match and re.match(r"[^@]*:[^@]*@", match[2]):  # a secret may hold a slash
        raise ConfigError(
            f"invalid {name}: got a URL with a password, expected one without. Give credentials by the environment or a profile"
        )
    if not match or not match[2].strip("/"):
        raise ConfigError(f"invalid {name}: got {checked.shown(url)}, expected a URL such as s3://bucket/prefix")
    scheme = match[1]
    if scheme == "memory":
        raise ConfigError(
            f"invalid {name}: got {checked.shown(url)}, which keeps nothing when its process ends, expected a store that lasts, such as s3://bucket/prefix"
        )
    if scheme in S3 and importlib.util.find_spec("s3fs") is None:
        raise ConfigError(
            f"invalid {name}: got {checked.shown(url)}, and s3fs is not installed. Run pip install 'try-to-persist[s3]'"
        )
    try:
        if scheme not in S3:
            import fsspec

            fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"invalid {name}: got {checked.shown(url)}, which cannot be used: {error}. Install what it names, or correct the URL"
        ) from None
    return url.rstrip("/")
