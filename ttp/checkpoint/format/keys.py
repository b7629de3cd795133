"""The names under which stock torch looks for things in a checkpoint, and the optimizer's hyperparameters under them.

Owns naming only. The names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`, flattened as
`dcp.save({"model": ..., "optim": ...})` does:

    model.<fqn>                              a parameter or buffer
    optim.state.<fqn>.<name>                 a tensor of the optimizer's state (`exp_avg`, `step`)
    optim.param_groups.<i>.<hyper>           group i's hyperparameter, or its `params` (a list of fqns)
    optim.param_groups.<fqn>.<hyper>         the same, once per parameter: `flatten_optimizer_state_dict=True`
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_GROUP_KEY = re.compile(r"optim\.param_groups\.(\d+)\.([^.]+)")


def model_key(fqn: str) -> str:
    return f"model.{fqn}"


def optim_state_key(fqn: str, name: str) -> str:
    """`name` is the optimizer's own (`exp_avg`) and has no dot."""
    return f"optim.state.{fqn}.{name}"


def param_group_blobs(groups: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the non-tensor entries that let stock torch restore `groups` (hyperparameters and `params`: fqns, each).

    Both forms that torch knows are there: by group number, and by parameter. Where the two collide (a parameter whose
    whole name is a number) the form by group number counts. Every group must have at least the hyperparameters of the
    optimizer that will load them: pass the base optimizer's own `param_groups`. `betas` becomes a tuple, as torch has it.
    """
    by_group: dict[str, object] = {}
    by_parameter: dict[str, object] = {}
    for i, group in enumerate(groups):
        fqns = group["params"]
        if not isinstance(fqns, Sequence) or not all(isinstance(fqn, str) for fqn in fqns):
            raise TypeError(f"param group {i}: params is {fqns!r}, expected a list of parameter names")
        for name, value in group.items():
            value = tuple(value) if name == "betas" and isinstance(value, list) else value
            by_group[f"optim.param_groups.{i}.{name}"] = list(fqns) if name == "params" else value
            if name != "params":
                by_parameter.update({f"optim.param_groups.{fqn}.{name}": value for fqn in fqns})
    return by_parameter | by_group


def nested_path(key: str) -> tuple[str | int, ...]:
    """Return where `key`'s value sits in the nested state dict: torch's `planner_data`, used to unflatten.

    `optim.state.layers.0.wq.exp_avg` -> ("optim", "state", "layers.0.wq", "exp_avg").
    """
    if match := _GROUP_KEY.fullmatch(key):
        return ("optim", "param_groups", int(match.group(1)), match.group(2))
    if key.startswith("optim.state."):
        fqn, _, name = key.removeprefix("optim.state.").rpartition(".")
        return ("optim", "state", fqn, name) if fqn else ("optim", "state", name)
    head, _, rest = key.partition(".")
    return (head, rest) if rest else (head,)
