"""`python -m ttp.launch.stores --port 29400`: the command; what it does is in `ttp/launch/rendezvous/multi_endpoint.py`."""

from __future__ import annotations

import sys

from ttp.launch.rendezvous.multi_endpoint import main

if __name__ == "__main__":
    sys.exit(main())
