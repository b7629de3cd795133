"""Posts a job's events to a Slack channel, or to anything that takes {"text": ...} by HTTP.

    ttprun --on-event 'python examples/monitoring/slack.py https://hooks.slack.com/services/...' train.py

`ttprun` starts it for each event, with the event as one line of JSON on stdin (docs/metrics.md lists them). Starts and other
news are passed over: a fault, a recovery without a restart, a spare node's coming and the end of the job are posted.
"""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 10.0


def text_of(event: Mapping[str, Any]) -> str:
    """Return what is posted; empty: nothing is."""
    match event["event"]:
        case "fault" | "recovered":
            who = ", ".join(f"rank {each['rank']} on {each['host']}: {each['cause']}" for each in event["culprits"])
            lost = "an unknown number of" if event["steps_lost"] is None else event["steps_lost"]
            saved = event.get("saved")
            kept = (
                f"step {saved['step']} was saved" if saved else event.get("not_saved") or "training continued in place"
            )
            next_ = f". Next: {event['next']}" if event.get("next") else ""
            return f":warning: attempt {event['start']}: {who or event['kind']}; {kept}, {lost} steps lost{next_}"
        case "spare":
            return f":arrows_counterclockwise: node {event['node']} takes the place of {event['in_place_of']}"
        case "end":
            why = f": {event['why']}" if event.get("why") else ""
            return f":checkered_flag: the job {event['result']}{why} (after {event['starts']} attempts)"
    return ""


def main() -> int:
    (url,) = sys.argv[1:]
    event = json.loads(sys.stdin.readline())
    if text := text_of(event):
        body = json.dumps({"text": f"{socket.gethostname()}: {text}"}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
