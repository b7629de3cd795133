#!/usr/bin/env bash
# Trains on several machines of eight devices: run it on each, with the same table. Two pipeline stages, two micro-batches.
#
#   bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START
#
# RANK_START: the first rank of this machine: 0, 8, ... Further arguments go to train.py. Output is in device_R/trainR.log of each rank R.
# Variables: MASTER_PORT (29500), DEVICES (8): ranks of a machine.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "run_cluster.sh: arguments: got $#, expected DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_path=$1
devices=${DEVICES:-8}
export RANK_TABLE_FILE=$2 RANK_SIZE=$3 LOG_NAMES=cluster
rank_start=$4
shift 4
if ((rank_start % devices || rank_start >= RANK_SIZE)); then
    echo "run_cluster.sh: RANK_START: got $rank_start, expected a multiple of $devices below $RANK_SIZE. Correct it, or set DEVICES" >&2
    exit 2
fi
if [ ! -f "$data_path" ]; then
    echo "run_cluster.sh: DATA_PATH: got $data_path, expected a file of pairs. Run python preprocess.py first, or correct the path" >&2
    exit 2
fi
data_path=$(realpath "$data_path")
for ((i = rank_start; i < rank_start + devices; i++)); do
    rm -rf "device_$i"
done
exec ttprun --rank_table_file "$RANK_TABLE_FILE" --node-rank $((rank_start / devices)) --master-port "${MASTER_PORT:-29500}" \
    --no-python "$here/on_device.sh" device_ "$here/train.py" --distribute=true --file_path="$data_path" --pipeline_stage=2 \
    --micro_batch_num=2 "$@"
