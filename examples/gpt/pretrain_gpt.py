"""Pretrains a GPT as a YAML file says, with the names that MindFormers' script of this name has.

    bash examples/gpt/pretrain_gpt.sh                                  on the visible devices
    python examples/gpt/pretrain_gpt.py --config_path run.yaml         alone, as one rank

Further arguments change keys of the file: --training_config.training_iters 100.
"""

from __future__ import annotations

import argparse
import os

from ttp.trainer.__main__ import run_as_program
from ttp.trainer.config.loader import MODEL_TYPE


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrains a GPT.", allow_abbrev=False)
    parser.add_argument("--config_path", default="pretrain_gpt.yaml", help="the YAML file (default: %(default)s)")
    parser.add_argument("--run_cmd", default="", help="the command that starts the job; it is printed, for the log")
    parser.add_argument("--model_type", default=MODEL_TYPE, help="the file's section of the model, beside model_config")
    args, overrides = parser.parse_known_args()
    if args.run_cmd and os.environ.get("RANK", "0") == "0":
        print(f"run command: {args.run_cmd}", flush=True)
    run_as_program(["--config", args.config_path, "--model_type", args.model_type, *overrides])


if __name__ == "__main__":
    main()
