"""What one episode of the fault harness does, drawn from a seed (PURE).

An episode trains some steps on the device, lets a fault happen at a point of a step, freezes all ranks, decides as the controller does, rolls
forward and dumps. The step that is saved must have the bits of a run without a fault.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tests.device.backend import drawn_traits

STEPS = 4
AT = {"abort_waiting": "ready", "abort_early": "backward"}
"""Where a fault happens that is not to happen anywhere else."""
POINTS = ("backward", "ready", "record", "updating", "done", "gathering")
KINDS = {
    "stop": "the training thread does not go on",
    "dead": "the same, and the rank does not answer a freeze",
    "raise": "the training thread raises",
    "hang": "a kernel hangs on the training thread's stream",
    "hang_beside": "a kernel hangs on a stream that nothing waits for",
    "hung_stop": "the same, and the training thread does not go on",
    "stuck": "a kernel hangs on a stream that nothing waits for, and the training thread does not go on",
    "slow": "a kernel takes long on the training thread's stream",
    "abort": "this rank's communicators are aborted",
    "abort_one": "one of this rank's communicators is aborted",
    "abort_all": "every rank's communicators are aborted, wherever it is",
    "abort_waiting": "this rank's communicators are aborted while it waits for the others in the step's collective; the error shows late",
    "abort_early": "this rank's communicators but the first are aborted while it waits for the others in a reduction",
    "fail": "the device fails for good",
    "frozen": "no fault: the job is frozen at any moment",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One episode's."""

    seed: int
    kind: str
    victim: int
    step: int
    point: str
    lag_s: float
    """From the fault to the freeze; of an abort, from the point to the abort as well."""
    settings: tuple[tuple[str, Any], ...]
    """Of the optimizer."""
    base: str
    options: tuple[tuple[str, Any], ...]
    """Of the base."""
    dtype: str
    traits: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.kind} at rank {self.victim}, step {self.step}, {self.point}, freeze after {1e3 * self.lag_s:.0f} ms,"
            f" {self.base} {dict(self.options)} on {self.dtype}, {dict(self.settings)}, {dict(self.traits)}"
        )


def plan_of(seed: int, world: int, kinds: Collection[str] = tuple(KINDS), **forced: Any) -> Plan:
    """Draw an episode. `kinds`: of which faults; `forced`: fields, settings or traits that are not drawn."""
    rng = random.Random(f"plan {seed} {world}")
    dtype = rng.choice(("float32", "float32", "bfloat16"))
    base = forced.get("base", rng.choice(("AdamW", "AdamW", "Adam", "SGD", "Adagrad")))
    options: dict[str, Any] = {"lr": 0.05}
    if base == "SGD":
        options["momentum"] = 0.9
    if base in ("AdamW", "Adam") and rng.random() < 0.4:
        options["foreach"] = True
    settings = {
        "ring": world % 2 == 1 or rng.random() < 0.3,
        "clip": rng.choice((None, "norm", "value")),
        "bucket_bytes": rng.choice((256, 1024, 1 << 20)),
        "local_copy": rng.random() < 0.2,
        "masters_apart": rng.random() < 0.3,
        "gradient_accumulation_shard": rng.random() < 0.3,
        "loss_scale": dtype == "bfloat16" and rng.random() < 0.5,
        "sums_on_device": rng.random() < 0.5,
    }
    traits = drawn_traits(seed)
    fields: dict[str, Any] = {
        "kind": rng.choice(sorted(kinds)),
        "victim": rng.randrange(world),
        "step": rng.randint(1, STEPS),
        "point": rng.choice(POINTS),
        "lag_s": rng.choice((0.0, 0.0, 0.005, 0.02, 0.05)) * rng.random(),
        "base": base,
        "dtype": dtype,
    }
    for name, value in forced.items():
        for where in (fields, settings, traits, options):
            if name in where or (where is options and name == "foreach"):
                where[name] = value
                break
        else:
            raise KeyError(name)
    if fields["kind"] in AT:
        fields |= {"point": AT[fields["kind"]], "lag_s": 0.02}
    if fields["kind"] == "abort_early":  # all reductions are under way by then: none is refused
        settings |= {"bucket_bytes": 1 << 20, "gradient_accumulation_shard": False, "ring": world % 2 == 1}
    if fields["kind"] == "abort_waiting":
        traits["error_lag_ms"] = 5000
    return Plan(
        seed=seed, settings=tuple(settings.items()), options=tuple(options.items()), traits=tuple(traits.items()), **fields
    )  # fmt: skip
