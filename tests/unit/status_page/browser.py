"""Chromium without a window, as Debian's package has it: what a page comes to in a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""None: there is no browser here."""
WITHOUT = "no browser here: Debian's package chromium has one"
BUDGET_MS = 3000
"""Of the page's own clock: two of its looks."""


def _run(folder: Path, link: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(str(PROGRAM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--lang=en-GB"),
        *(f"--user-data-dir={folder / 'profile'}", f"--virtual-time-budget={BUDGET_MS}", *words, link),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def dom(folder: Path, link: str) -> str:
    """Return the page's document after its script has run. `folder`: for the browser's own files."""
    return _run(folder, link, "--dump-dom", "--enable-logging=stderr").stdout


def screenshot(folder: Path, link: str, path: Path, width: int = 1100, height: int = 1150) -> None:
    _run(folder, link, f"--screenshot={path}", f"--window-size={width},{height}")
