"""`python -m ttp.checkpoint`: the same as `ttp ckpt`, see `cli/main.py`."""

import sys

from ttp.cli import main

sys.exit(main(["ckpt", *sys.argv[1:]]))
