#!/usr/bin/env bash
# Trains two more epochs from the newest checkpoint of run_parallel_save_ckpt.sh, on eight devices, model parallel 4 x data parallel 2.
#
#   bash run_parallel_recover_ckpt.sh DATA_PATH
#
# Another layout takes the same checkpoint: MP=2 before the command, --pipeline_stage=2 behind it. Further arguments go to
# parallel_recover_train.py (--ckpt_file=PATH). Variables: RANK_SIZE (8) and those of run.sh.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "run_parallel_recover_ckpt.sh: DATA_PATH: got none, expected the pairs that preprocess.py has written, as in: bash run_parallel_recover_ckpt.sh output/wmt14.fr_en.txt" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export DEVICE_FOLDER=recover PROGRAM=parallel_recover_train.py MP=${MP:-4}
exec bash "$here/run.sh" "$1" "${RANK_SIZE:-8}" --enable_parallel_optimizer=0 "${@:2}"
