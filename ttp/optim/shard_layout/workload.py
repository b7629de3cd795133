"""Which ranks do the same work in a step: those that have the same part of the model.

Owns the digest by which the controller knows them. Data-parallel replicas and the ranks that split one stage's matrices have the same; the stages of a
pipeline, and ranks with other experts, have others.
"""

from __future__ import annotations

import hashlib
import json

import torch


def workload_of(model: torch.nn.Module) -> str:
    """Return a hash of the names and whole shapes of this rank's parameters."""
    return digest([[name, list(param.shape)] for name, param in model.named_parameters()])


def digest(facts: object) -> str:
    """Return 16 hexadecimal digits of a JSON value."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
