"""train.py with the defaults of run_parallel_save_ckpt.sh: four epochs, checkpoints in output/saved/checkpoints."""

from __future__ import annotations

import sys

from train import main

from ttp.trainer.__main__ import run_as_program

if __name__ == "__main__":
    run_as_program(["--epochs=4", "--output_dir=output/saved", *sys.argv[1:]], main)
