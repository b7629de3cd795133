"""`python -m ttp.checkpoint`: see `tool.py`."""

import sys

from ttp.checkpoint.tool import main

sys.exit(main())
