"""`python -m benchmarks [NAME ...]`: run the benchmarks, or those named, one after the other.

Exit status: 0 when every one kept its limit, 1 otherwise.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def main(argv: Sequence[str]) -> int:
    unknown = sorted(set(argv) - set(names()))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: there are {', '.join(names())}", file=sys.stderr)
        return 2
    failed = []
    for name in argv or names():
        print(f"== {name}", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=HERE.parent, check=False).returncode != 0:
            failed.append(name)
        print(f"   ({time.monotonic() - began:.0f} s)\n", flush=True)
    print(f"limits kept: {len(argv or names()) - len(failed)}, missed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
