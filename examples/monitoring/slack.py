"""Posts a job's events to a Slack channel, or to anything that takes {"text": ...} by HTTP.

    (umask 077; echo https://hooks.slack.com/services/... > webhook)
    SLACK_WEBHOOK_FILE=webhook ttprun --on-event 'python examples/monitoring/slack.py' train.py

Whoever knows the webhook's URL can post there: it is in a file, as every user of the node sees command lines.
`ttprun` starts it for each event, with the event as one line of JSON on stdin (docs/metrics.md lists them). Starts and other
news are passed over: a fault, a recovery without a restart, a sick node, a spare node's coming, a slow rank and the end of the job are posted.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
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
        case "sick_node":
            return f":ambulance: node {event['node']} is excluded: {event['reason']}"
        case "straggler":
            who = f"rank {event['rank']} on {event['host']}"
            return f":snail: {who} takes {event['ratio']:.2f} times as long for its part of a step as the others, who wait for it"
        case "end":
            why = f": {event['why']}" if event.get("why") else ""
            return f":checkered_flag: the job {event['result']}{why} (after {event['starts']} attempts)"
    return ""


def main() -> int:
    try:
        url = Path(os.environ["SLACK_WEBHOOK_FILE"]).read_text().strip()
        event = json.loads(sys.stdin.readline())
        if text := text_of(event):
            body = json.dumps({"text": f"{socket.gethostname()}: {text}"}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except KeyError as error:
        print(
            f"slack.py: {error} is missing: expected SLACK_WEBHOOK_FILE in the environment, and an event",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        print(f"slack.py: nothing was posted: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (ValueError, http.client.HTTPException):  # its text may have the URL
        print(
            "slack.py: nothing was posted: expected a URL in SLACK_WEBHOOK_FILE, and a line of JSON on stdin",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
