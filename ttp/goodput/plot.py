"""The share of new steps over the number of ranks, as a picture. Needs matplotlib (the extra `plots`).

Owns the picture and its file. Models nothing itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ttp.errors import ConfigError
from ttp.goodput.closed_form import split
from ttp.goodput.cluster import Cluster, strategies

SIZES = tuple(2**power for power in range(6, 18))
"""Ranks that are drawn, and the cluster's own."""
FORMATS = (".png", ".svg", ".pdf")


def draw(cluster: Cluster, path: Path) -> None:
    """Write the picture. Raises ConfigError: matplotlib is missing, or the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'try-to-persist[plots]'") from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    sizes = sorted({*SIZES, cluster.ranks})
    for place, strategy in enumerate(strategies(cluster)):
        shares = [100.0 * split(strategies(replace(cluster, ranks=ranks))[place].policy).steps for ranks in sizes]
        axes.plot(sizes, shares, label=strategy.policy.name, linestyle="-" if strategy.built else ":")
    axes.axvline(cluster.ranks, color="#8d96a3", linewidth=0.8)
    axes.set(xscale="log", xlabel="ranks", ylabel="share of the time in new steps, %")
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror or error}") from None
