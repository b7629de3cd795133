#!/usr/bin/env bash
# Trains four epochs on eight devices, model parallel 4 x data parallel 2, and leaves checkpoints in output/saved/checkpoints.
#
#   bash run_parallel_save_ckpt.sh DATA_PATH
#
# Further arguments go to parallel_save_ckpt_train.py. Variables: RANK_SIZE (8) and those of run.sh.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "run_parallel_save_ckpt.sh: DATA_PATH: got none, expected the pairs that preprocess.py has written, as in: bash run_parallel_save_ckpt.sh output/wmt14.fr_en.txt" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export DEVICE_FOLDER=ckpt_dir PROGRAM=parallel_save_ckpt_train.py MP=${MP:-4}
exec bash "$here/run.sh" "$1" "${RANK_SIZE:-8}" --enable_parallel_optimizer=0 "${@:2}"
