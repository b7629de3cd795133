"""`python -m benchmarks [NAME ...]`: run the benchmarks, or those named, one after the other.

Those of ON_REQUEST are run only when they are named.

Exit status: 0 when every one kept its limit, 1 otherwise.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ON_REQUEST = ("peers",)
"""Installs other systems, some GB, and takes 20 minutes."""


def names() -> list[str]:
    modules = {path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_")}
    return sorted(modules | {path.parent.name for path in HERE.glob("*/__main__.py")})


def main(argv: Sequence[str]) -> int:
    unknown = sorted(set(argv) - set(names()))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: there are {', '.join(names())}", file=sys.stderr)
        return 2
    failed = []
    chosen = argv or [name for name in names() if name not in ON_REQUEST]
    for name in chosen:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=HERE.parent, check=False).returncode != 0:
            failed.append(name)
        print(f"   ({time.monotonic() - began:.0f} s)\n", flush=True)
    print(f"limits kept: {len(chosen) - len(failed)}, missed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
