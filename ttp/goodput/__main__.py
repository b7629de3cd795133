"""`python -m ttp.goodput`: see `main.py`."""

import sys

from ttp.goodput.main import main

if __name__ == "__main__":
    sys.exit(main())
