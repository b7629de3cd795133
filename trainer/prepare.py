"""`python -m ttp.trainer.prepare INPUT OUTPUT [--tokenizer PATH]`: the command; what it does is in `trainer/data/prepare.py`."""

from __future__ import annotations

import signal
import sys

from .data.prepare import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as any filter
    sys.exit(main())
