"""`python -m tests.fuzz [SEED [CASES [FILE]]]`: the fuzz tests at length; prints the seed, and how to run it again.

CASES: of each test; there are more than fifty tests, so that the default makes well over 20,000 cases, and another 25,000 of attacks on a controller with TLS.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

CASES = 1500


def main(argv: list[str]) -> int:
    """Run pytest; return its status."""
    seed = int(argv[0]) if argv and int(argv[0]) else random.SystemRandom().randrange(1, 2**31)
    cases = int(argv[1]) if len(argv) > 1 else CASES
    print(f"fuzz: seed {seed}, {cases} cases a test; again: python -m tests.fuzz {seed} {cases}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).parent.joinpath(*argv[2:3])),
        "-q",
        "-m",
        "",
        "--timeout",
        "3600",
        f"--hypothesis-seed={seed}",
    ]
    return subprocess.run(command, env={**os.environ, "TTP_TEST_FUZZ_CASES": str(cases)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
