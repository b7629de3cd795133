"""Puts the rank tables of several machines together: `python merge_hccl.py hccl_a.json hccl_b.json`.

Machines come in the order of the arguments, rank ids ascend through them. Every machine needs the same file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hccl_tools import table_of, write_table

from ttp.errors import ConfigError
from ttp.inputs.input_file import read_json
from ttp.launch.hosts.rank_table import read_rank_table


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table into the current folder and print its path. Returns 0, or 2 for tables that cannot be merged."""
    parser = argparse.ArgumentParser(prog="merge_hccl.py", description="Put rank tables of several machines together.")
    parser.add_argument("file", nargs="+", help="tables that hccl_tools.py has written, in the order of the machines")
    parser.add_argument("--output", type=Path, help="default: hccl_<servers>s_<devices>p.json in this folder")
    given = parser.parse_args(argv)
    servers = []
    try:
        for path in given.file:
            read_rank_table(path)
            table = read_json(path)
            if "server_list" not in table:
                raise ConfigError(f"{path}: got a table with group_list, expected one with server_list")
            servers += table["server_list"]
        merged = table_of(servers)
        devices = sum(len(server["device"]) for server in servers)
        output = (given.output or Path(f"hccl_{len(servers)}s_{devices}p.json")).absolute()
        write_table(output, merged)
    except (ConfigError, OSError, ValueError) as error:
        print(f"merge_hccl.py: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
