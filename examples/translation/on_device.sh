#!/usr/bin/env bash
# One rank of run.sh: its variables are in env.log, what it prints in train.log, in a folder of its own. Further starts append.
#
#   ttprun --no-python --nproc-per-node 8 examples/translation/on_device.sh FOLDER train.py --distribute=true
#
# FOLDER: device, for device0, device1, ...
set -euo pipefail

folder=$1$RANK
program=$2
shift 2
mkdir -p "$folder"
export DEVICE_ID=${DEVICE_ID:-$LOCAL_RANK} RANK_ID=$RANK RANK_SIZE=$WORLD_SIZE
env >"$folder/env$RANK.log"
log=$folder/train.log$RANK
[ "${LOG_NAMES:-}" = cluster ] && log=$folder/train$RANK.log
exec python -u "$program" "$@" >>"$log" 2>&1
