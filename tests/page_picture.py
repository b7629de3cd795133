"""The picture of the status page, docs/pictures/status_page.png: `python -m tests.page_picture FOLDER` makes it anew, of a real job in FOLDER.

Needs Chromium, and takes a minute: a rank is killed, and the next attempt trains until the curves have a shape.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.chaos.conftest import SMALL
from tests.rooms import ROOT
from tests.unit.status_page.browser import screenshot
from tests.unit.status_page.live_page import get
from ttp.chaos.observed.training_job import TrainingJob
from ttp.status import page_access

PICTURE = ROOT / "docs" / "pictures" / "status_page.png"
WAIT_S = 300.0


def main() -> int:
    (folder,) = map(Path, sys.argv[1:])
    runs = (*SMALL, "--training_config.training_iters=100000", "--training_config.save_interval=400")
    environ = {"TTP_HOST": "node-a"}
    with TrainingJob(folder, ranks=4, overrides=runs, launcher=["--status-port", "0"], environ=environ) as job:

        def points() -> int:
            place = page_access.read(folder / "log")
            if place is None:
                return 0
            login = {"Authorization": f"Bearer {Path(place.token_file).read_text().strip()}"}
            try:
                reply = get(place, "/status.json", **login)
            except OSError:
                return 0
            found = json.loads(reply.body) if reply.status == 200 else {}
            return len(found["curve"]["step"]) if found.get("attempt") == len(job.starts()) - 1 else 0

        job.wait_for(lambda: points() >= 3, "first attempt's curve", WAIT_S)
        job.kill(2)
        job.wait_for(lambda: len(job.starts()) == 2 and points() >= 8, "second attempt's curve", WAIT_S)
        place = page_access.read(folder / "log")
        assert place is not None
        with tempfile.TemporaryDirectory() as own:
            screenshot(Path(own), page_access.login_link(place, time.time()), PICTURE, 1100, 1570)
    with Image.open(PICTURE) as image:
        image.convert("RGB").quantize(128).save(PICTURE, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
