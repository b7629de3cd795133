"""The monitoring examples: rules and dashboard are what Prometheus and Grafana take, and the command posts what happened.

That every metric that they name is in a scrape is in `tests/unit/status_page/test_live_page.py`.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import LONG_S
from ttp.launch.report.event_command import EventCommand, split_command

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "monitoring"
FAULT = {
    "unix_s": 1.0, "event": "fault", "launch": "l", "start": 0, "kind": "exited", "steps_lost": 0, "next": "restart 1 of 3",
    "culprits": [{"rank": 3, "host": "n1", "cause": "signal SIGKILL"}], "saved": {"step": 42, "path": "/c"}, "not_saved": "",
}  # fmt: skip


@pytest.fixture
def channel() -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """Return the address of a server that takes messages, and what it has taken."""
    taken: queue.Queue[dict[str, Any]] = queue.Queue()

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Taker) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/services/x", taken
        server.shutdown()
        thread.join(LONG_S)


def test_faults_sick_nodes_slow_ranks_and_the_end_are_posted_and_starts_are_not(
    channel: tuple[str, queue.Queue[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, taken = channel
    (tmp_path / "webhook").write_text(f"{url}\n")
    monkeypatch.setenv("SLACK_WEBHOOK_FILE", str(tmp_path / "webhook"))
    command = EventCommand(split_command(f"{sys.executable} {FOLDER / 'slack.py'}"))
    lost = {"saved": None, "not_saved": "all ranks are dead", "steps_lost": None}
    recovered = {**FAULT, "event": "recovered", "saved": None, "not_saved": ""}
    del recovered["next"]
    for event in (
        {"event": "start", "start": 0},
        FAULT,
        {**FAULT, **lost},
        recovered,
        {"event": "sick_node", "start": 0, "node": "n1", "reason": "memory errors"},
        {"event": "straggler", "start": 0, "rank": 3, "host": "n1", "ratio": 1.25, "own_s": 0.5, "others_s": 0.4},
        {"event": "straggler_over", "start": 0, "rank": 3, "host": "n1", "why": "as fast as the others again"},
        {"event": "end", "result": "succeeded", "starts": 2, "why": ""},
    ):
        command.put(json.dumps(event) + "\n")
    command.close(LONG_S)
    texts = [taken.get_nowait()["text"] for _ in range(taken.qsize())]
    assert len(texts) == 6
    assert "rank 3 on n1: signal SIGKILL; step 42 was saved, 0 steps lost. Next: restart 1 of 3" in texts[0]
    assert "all ranks are dead, an unknown number of steps lost" in texts[1]
    assert "training continued in place, 0 steps lost" in texts[2]
    assert "node n1 is excluded: memory errors" in texts[3]
    assert "rank 3 on n1 takes 1.25 times as long for its part of a step as the others" in texts[4]
    assert "the job succeeded (after 2 attempts)" in texts[5]


@pytest.mark.parametrize(
    ("webhook", "says"),
    [
        (None, "'SLACK_WEBHOOK_FILE' is missing"),
        ("http://127.0.0.1:1/secret", "Connection refused"),
        ("no URL, secret", "expected a URL in SLACK_WEBHOOK_FILE"),
        ("http://127.0.0.1:1/secret x", "nothing was posted"),
    ],
)
def test_what_cannot_be_posted_is_one_line_without_the_url(tmp_path: Path, webhook: str | None, says: str) -> None:
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    if webhook is not None:
        (tmp_path / "webhook").write_text(webhook)
        environ["SLACK_WEBHOOK_FILE"] = str(tmp_path / "webhook")
    words = [sys.executable, str(FOLDER / "slack.py")]
    done = subprocess.run(words, input=json.dumps(FAULT), env=environ, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and says in done.stderr and "secret" not in done.stderr


def test_the_rules_are_rules() -> None:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) == 10
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"} and "summary" in rule["annotations"]
        assert rule["labels"]["severity"] in ("warning", "critical")
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert (
        scrape["rule_files"] == ["alerts.yaml"]
        and scrape["scrape_configs"][0]["tls_config"]["server_name"] == "page.ttp"
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus has promtool")
def test_prometheus_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.y*ml"):
        text = path.read_text().replace("/etc/prometheus/", f"{tmp_path}/")
        (tmp_path / path.name).write_text(text)
    for name in ("job.token", "status_page.pem"):
        (tmp_path / name).write_text("x")
    for words in (("check", "rules", "alerts.yaml"), ("check", "config", "--syntax-only", "prometheus.yml")):
        done = subprocess.run(
            ["promtool", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus has promtool")
def test_a_fault_at_which_the_lead_moves_is_seen(tmp_path: Path) -> None:
    """The new leader's count begins after it: by its own series nothing has increased."""
    series = [
        {"series": f'ttp_faults_total{{instance="{node}",job="ttp",outcome="not_saved"}}', "values": values}
        for node, values in (("n0", "0x10"), ("n1", "_x10 1x10"))
    ]
    fires = {"eval_time": "13m", "alertname": "TTPFaultNotSaved"}
    (rule,) = [
        rule
        for rule in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
        if rule["alert"] == fires["alertname"]
    ]
    alert = {
        "exp_labels": {**rule["labels"], "job": "ttp", "outcome": "not_saved"},
        "exp_annotations": rule["annotations"],
    }
    test = {"interval": "1m", "input_series": series, "alert_rule_test": [{**fires, "exp_alerts": [alert]}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yaml")], "tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yaml")],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_asks_for_something_in_every_panel() -> None:
    dashboard = json.loads((FOLDER / "grafana_dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) == 19
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["targets"] and all("ttp_" in target["expr"] for target in panel["targets"])
        assert panel["datasource"]["uid"] == "${datasource}"
