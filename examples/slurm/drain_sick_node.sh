#!/bin/sh
# For ttprun --on-event: has Slurm drain a node whose health check failed. It may run twice for a node, which changes nothing.
#
#   ttprun --health-check builtin --on-event 'sh examples/slurm/drain_sick_node.sh' train.py
#
# The job's user needs the right to do that (an operator of Slurm, or a rule of sudo for scontrol: set SCONTROL="sudo scontrol").
event=$(cat)
case $event in *'"event": "sick_node"'*) ;; *) exit 0 ;; esac
fields=$(printf '%s' "$event" | python3 -c '
import json, sys
event = json.load(sys.stdin)
print(" ".join(event["node"].split()))
print(" ".join(event["reason"].split())[:200])')
node=$(printf '%s\n' "$fields" | head -n 1)
reason=$(printf '%s\n' "$fields" | tail -n 1)
case $node in '' | ALL | *[!A-Za-z0-9._-]*) exit 0 ;; esac # else it might name other nodes, as all or a range of them
exec ${SCONTROL:-scontrol} update "nodename=$node" state=drain "reason=ttp: $reason"
