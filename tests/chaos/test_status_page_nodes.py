"""The status page of a job on two nodes: HTTPS that another node checks by a copy of the certificate, at the node whose controller leads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import arguments
from tests.chaos.test_nodes import MakeNodes, nodes, pytestmark, train_a_little, wait_for_verdict
from ttp.chaos.nodes.namespaces import Node
from ttp.chaos.observed.nodes_job import NodesJob
from ttp.status import page_access

__all__ = ["nodes", "pytestmark"]
PORT = 9105
STEPS = ("--training_config.training_iters=100000", "--training_config.log_interval=100")
SCRAPE = """
import socket, ssl, sys
host, port, pem, token, path = sys.argv[1:]
context = ssl.create_default_context(cafile=pem)
with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain, server_hostname="page.ttp") as client:
    client.sendall(f"GET {path} HTTP/1.1\\r\\nAuthorization: Bearer {token}\\r\\n\\r\\n".encode())
    answer = b""
    while part := client.recv(65536):
        answer += part
head, _, body = answer.decode().partition("\\r\\n\\r\\n")
sys.stdout.write(body)
sys.exit(0 if head.split()[1] == "200" else 1)
"""


def scraped(job: NodesJob, of: str, by: Node, folder: Path, path: str = "/status.json") -> dict[str, Any]:
    """Ask one node's page from another node, as a scraper does that has a copy of its certificate; nothing where it does not answer."""
    place = page_access.read(job.output_dir / "log")
    if place is None:
        return {}
    token = Path(place.token_file).read_text().strip()
    words = [sys.executable, "-c", SCRAPE, of, str(PORT), str(folder / "copy.pem"), token, path]
    with open(folder / "answer", "wb") as answer:
        status = by.popen(words, output=answer).wait(60)
    return dict(json.loads((folder / "answer").read_text())) if status == 0 else {}


@pytest.mark.long
def test_the_page_is_on_the_node_that_leads_and_its_certificate_stays(tmp_path: Path, nodes: MakeNodes) -> None:
    """Then that node is lost: the other one has rank 0 in the next attempt, and the page, with the same certificate and token."""
    a, b = nodes(2)
    pem = tmp_path / "output" / "log" / "status_page.pem"
    launcher = ["--status-port", str(PORT)]
    with NodesJob(tmp_path / "output", (a, b), overrides=arguments(*STEPS), launcher=launcher) as job:
        train_a_little(job, 0)
        lost = job.node_of_rank(0)
        stays = b if lost is a else a
        job.wait_for(pem.exists, "the certificate", 60)
        (tmp_path / "copy.pem").write_bytes(pem.read_bytes())
        job.wait_for(
            lambda: scraped(job, lost.name, stays, tmp_path).get("phase") == "training", f"page of {lost.name}", 120
        )
        assert not scraped(job, stays.name, lost, tmp_path)  # a standby serves none
        place = page_access.read(job.output_dir / "log")
        assert place is not None and place.url == f"https://{lost.name}:{PORT}/"
        lost.power_off()
        wait_for_verdict(job, 0)
        lost.plug()
        job.start(lost)
        train_a_little(job, 1)
        leads = job.node_of_rank(0)
        other = b if leads is a else a
        job.wait_for(
            lambda: scraped(job, leads.name, other, tmp_path).get("attempt") == 1, f"page of {leads.name}", 120
        )
        found = scraped(job, leads.name, other, tmp_path)
        assert [fault["outcome"] for fault in found["faults"] if fault["outcome"] != "false alarm"] == ["saved"]
        assert pem.read_bytes() == (tmp_path / "copy.pem").read_bytes()
