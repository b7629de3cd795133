"""The status page, the metrics and `--on-event` of a real job, over a controller's death and a restart."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import JOB_S, SMALL
from tests.ports import free_port
from tests.unit.status_page.live_page import get
from ttp.chaos.observed.training_job import TrainingJob
from ttp.status import page_access
from ttp.status.main import main

RUNS = (*SMALL, "--training_config.training_iters=100000", "--training_config.tensorboard")


@pytest.mark.long
def test_the_page_moves_with_the_lead_and_events_reach_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One address, one token and one cookie over all of it: first the controller dies, then a rank."""
    port, got = free_port(), tmp_path / "events"
    token_file = tmp_path / "job.token"
    token_file.write_text("0123456789abcdef0123456789abcdef\n")
    token_file.chmod(0o600)
    launcher = [
        "--status-port", str(port), "--status-token-file", str(token_file), "--on-event", f"sh -c 'cat >> {got}; exit 3'",
    ]  # fmt: skip
    overrides = (*RUNS, str(tmp_path / "board"))
    with TrainingJob(tmp_path / "output", ranks=2, overrides=overrides, launcher=launcher) as job:
        log_dir, address = job.output_dir / "log", f"http://127.0.0.1:{port}/"
        login = {"Authorization": f"Bearer {token_file.read_text().strip()}"}

        def shown() -> dict[str, Any]:
            """Return what the page shows; nothing where it does not answer now."""
            try:
                reply = get(address, "/status.json", **login)
            except OSError:
                return {}
            return dict(json.loads(reply.body)) if reply.status == 200 else {}

        def is_led_by(place: int, attempt: int) -> bool:
            found = shown()
            leader = found.get("leader") or {}
            return leader.get("place") == place and found["attempt"] == attempt and found["phase"] == "training"

        job.wait_for(lambda: is_led_by(0, 0) and (shown()["step"] or 0) > 2, "page of the first controller", JOB_S)
        assert main(["--login", str(job.output_dir)]) == 0
        first = get(address, "/" + capsys.readouterr().out.strip().removeprefix(address))
        login = {"Cookie": first.headers["set-cookie"].partition(";")[0]}

        os.kill(job.controller_pids()[0], signal.SIGKILL)
        job.wait_for(lambda: is_led_by(1, 0), "page of the standby that has taken over", JOB_S)
        job.kill(1)
        job.wait_for(lambda: is_led_by(0, 1), "page of the second attempt", JOB_S)
        faults = [fault for fault in shown()["faults"] if fault["outcome"] != "false alarm"]
        assert [(fault["kind"], fault["outcome"]) for fault in faults] == [("exited", "saved")]
        metrics = get(address, "/metrics", **login).body
        assert 'ttp_faults_total{outcome="saved"} 1.0' in metrics and re.search(r"^ttp_step \d", metrics, re.MULTILINE)

        job.process.send_signal(signal.SIGTERM)
        job.wait(JOB_S)
        console = job.console_tail(100_000)
        assert job.leftovers() == [] and page_access.read(log_dir) is None
    taken = [json.loads(line) for line in got.read_text().splitlines()]
    assert taken == [json.loads(line) for line in (log_dir / "story.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in taken]
    assert kinds.count("fault") == 2 and kinds[0] == "start" and kinds[-1] == "end"
    assert console.count("it ended with exit status 3") == 1 and list((tmp_path / "board").iterdir())
