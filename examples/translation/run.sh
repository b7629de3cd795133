#!/usr/bin/env bash
# Trains on the devices of this machine, with the model split over all of them.
#
#   bash run.sh DATA_PATH RANK_SIZE
#
# DATA_PATH: the pairs that preprocess.py has written (output/wmt14.fr_en.txt). RANK_SIZE: 2 or 8. Further arguments go to train.py:
# --mp 2 --pipeline_stage 2. What rank 0 prints is in device0/train.log0. Variables: RANK_TABLE_FILE, MASTER_PORT (29500).
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "run.sh: arguments: got $#, expected DATA_PATH and RANK_SIZE, as in: bash run.sh output/wmt14.fr_en.txt 8" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_path=$1
rank_size=$2
shift 2
export RANK_TABLE_FILE=${RANK_TABLE_FILE:-$here/rank_table_${rank_size}pcs.json}
if [ ! -f "$RANK_TABLE_FILE" ]; then
    echo "run.sh: RANK_SIZE: got $rank_size, expected one with a table rank_table_${rank_size}pcs.json. Write it, or set RANK_TABLE_FILE" >&2
    exit 2
fi
if [ ! -f "$data_path" ]; then
    echo "run.sh: DATA_PATH: got $data_path, expected a file of pairs. Run python preprocess.py first, or correct the path" >&2
    exit 2
fi
data_path=$(realpath "$data_path")

folder=${DEVICE_FOLDER:-device}
for ((i = 0; i < rank_size; i++)); do
    rm -rf "$folder$i"
    echo "start training for $folder $i"
done
if ttprun --rank_table_file "$RANK_TABLE_FILE" --master-port "${MASTER_PORT:-29500}" --no-python "$here/on_device.sh" \
    "$folder" "$here/${PROGRAM:-train.py}" --distribute=true --file_path="$data_path" --mp="${MP:-$rank_size}" "$@"; then
    echo "training success"
else
    echo "training failed: see ${folder}0/train.log0"
    exit 2
fi
