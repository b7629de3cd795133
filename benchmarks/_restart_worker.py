"""The bundled trainer, with the times at which a rank gets to each stage of its start.

Each stage is a line of `stamps.jsonl` in the folder that RESTART_STAMPS names; the trainer itself is unchanged.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def stamp(stage: str) -> None:
    line = {"stage": stage, "unix_s": time.time(), "rank": int(os.environ["RANK"]), "pid": os.getpid()}
    with open(os.path.join(os.environ["RESTART_STAMPS"], "stamps.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def stamped(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if before:
            stamp(before)
        result = function(*args, **kwargs)
        if after:
            stamp(after)
        return result

    return call


stamp("script")
import torch.distributed as dist  # noqa: E402

import ttp.groups.process_groups as groups  # noqa: E402
import ttp.optim.replica_optimizer as replicas  # noqa: E402
import ttp.session  # noqa: E402
import ttp.trainer.train  # noqa: E402
from ttp.trainer.__main__ import main  # noqa: E402

stamp("imported")
dist.init_process_group = stamped(dist.init_process_group, "text opened", "process group")
ttp.start = stamped(ttp.session.start, "model and optimizer", "protected")
ttp.session.Session.resume = stamped(ttp.session.Session.resume, after="loaded")  # type: ignore[method-assign]
groups.ProcessGroups.make_again = stamped(groups.ProcessGroups.make_again, after="groups")  # type: ignore[method-assign]
replicas.TTPReplicaOptimizer.fill = stamped(replicas.TTPReplicaOptimizer.fill, after="filled")  # type: ignore[method-assign]
sys.exit(main())
