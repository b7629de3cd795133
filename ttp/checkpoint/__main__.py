"""`python -m ttp.checkpoint`: the same as `ttp ckpt`, see `cli.py`."""

import sys

from ttp.checkpoint.cli import main

sys.exit(main())
