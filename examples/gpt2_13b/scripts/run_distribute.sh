#!/usr/bin/env bash
# Trains GPT2-13B on the machines of a rank table, or generates text from what it has trained. Run it on every machine.
#
#   bash run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_MODE RANK_SIZE
#
# DEVICE_RANGE: the ranks of this machine, the last one excluded: [0,8] on the first, [8,16] on the second. RUN_MODE: train or predict.
# Further arguments go to the trainer (train) or to ttp.trainer.generate (predict). Variables: MASTER_PORT (29500), PROMPT.
set -euo pipefail

exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/run_distribute.py" "$@"
