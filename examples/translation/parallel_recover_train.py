"""train.py with the defaults of run_parallel_recover_ckpt.sh: two more epochs from the newest checkpoint in output/saved/checkpoints."""

from __future__ import annotations

import sys

from train import main

from ttp.trainer.__main__ import run_as_program

DEFAULTS = ["--epochs=2", "--output_dir=output/recovered", "--ckpt_file=output/saved/checkpoints"]

if __name__ == "__main__":
    run_as_program([*DEFAULTS, *sys.argv[1:]], main)
