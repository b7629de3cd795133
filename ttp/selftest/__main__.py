"""`python -m ttp.selftest`: see `main.py`."""

import sys

from ttp.selftest.main import main

if __name__ == "__main__":
    sys.exit(main())
