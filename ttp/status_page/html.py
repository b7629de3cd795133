"""The page itself: one file with its style and its script, which asks for /status.json. It loads nothing else.

Owns the policy by which a browser runs that script and no other, whatever a rank's error message holds.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from ttp.status_page.http_server import Response

PAGE = Path(__file__).with_name("page.html")


@cache
def page_response() -> Response:
    """Return the page. Raises OSError: the installation is broken."""
    text = PAGE.read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    )
    return Response("text/html; charset=utf-8", text.encode(), policy)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
