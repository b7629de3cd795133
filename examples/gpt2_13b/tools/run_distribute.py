"""The command of `scripts/run_distribute.sh`: checks its five arguments against the rank table, then becomes `ttprun` or the generator.

Owns the reading of the arguments. Never starts a process of its own.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence

from ttp.errors import ConfigError
from ttp.launch.hosts.rank_table import RankTable, read_rank_table
from ttp.trainer.config.loader import load_config

USAGE = "run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_MODE RANK_SIZE"
NUMBER = r"([0-9]{1,9})"


def node_of(table: RankTable, device_range: str) -> int:
    """Return the node whose ranks are the range: `[8,16]` is 8 to 15. Raises ConfigError."""
    known = ", ".join(f"[{server.ranks[0]},{server.ranks[-1] + 1}] for {server.server_id}" for server in table.servers)
    found = re.fullmatch(rf"\[{NUMBER},\s*{NUMBER}[\])]", device_range.strip())
    for node, server in enumerate(table.servers):
        if found and (server.ranks[0], server.ranks[-1] + 1) == (int(found[1]), int(found[2])):
            return node
    raise ConfigError(f"DEVICE_RANGE: got {device_range!r}, expected the ranks of one server of {table.path}: {known}")


def command(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command for the script's arguments; none for a machine that has nothing to do. Raises ConfigError."""
    if len(arguments) < 5:
        raise ConfigError(f"arguments: got {len(arguments)}, expected 5 or more. Usage: {USAGE}")
    path, config, device_range, mode, size, *more = arguments
    if mode not in ("train", "predict"):
        raise ConfigError(f"RUN_MODE: got {mode!r}, expected train or predict")
    table = read_rank_table(path)
    ranks = sum(len(server.ranks) for server in table.servers)
    if not re.fullmatch(NUMBER, size) or int(size) != ranks:
        raise ConfigError(f"RANK_SIZE: got {size!r}, expected {ranks}, the ranks of {path}")
    node = node_of(table, device_range)
    if mode == "train":
        load_config(config).parallel_config.data_parallel_size(ranks)
        place = [
            "--rank_table_file",
            path,
            "--node-rank",
            str(node),
            "--master-port",
            environ.get("MASTER_PORT", "29500"),
        ]
        return ["ttprun", *place, "-m", "ttp.trainer", "--config", config, *more]
    if node > 0:
        return []
    if not any(word.partition("=")[0] == "--checkpoint" for word in more):
        more += ["--checkpoint", load_config(config).training_config.output_dir]
    if not any(word.partition("=")[0] == "--prompt" for word in more):
        more += ["--prompt", environ.get("PROMPT", "The list ")]
    return [sys.executable, "-m", "ttp.trainer.generate", *more]


def main() -> int:
    """Become the command; return 2 for arguments that cannot be, 0 where another machine does the work."""
    logging.getLogger("ttp.trainer.config").setLevel(logging.ERROR)  # the trainer logs the notes on the file
    try:
        words = command(sys.argv[1:], os.environ)
    except ConfigError as error:
        print(f"run_distribute.sh: {error}", file=sys.stderr)
        return 2
    if not words:
        print("run_distribute.sh: the first machine generates the text; nothing to do here", file=sys.stderr)
        return 0
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"run_distribute.sh: {words[0]}: {error.strerror}. Install ttp where PATH finds it", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
