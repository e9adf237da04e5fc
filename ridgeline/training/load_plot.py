"""Figures of how mixtures' experts share the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_loads(logs: Mapping[str, Sequence[Mapping[str, float]]], reports: Mapping[str, Any], target: Path) -> None:
    """Draw, for several models, the training loss and the busiest expert's load over tokens, and each expert's share
    of the held-out tokens by layer.

    logs: the rows of each model's log. reports: what `recipe.run` returns.
    """
    figure, axes = plt.subplots(2, max(2, len(logs)), figsize=(11, 6.2), dpi=120, squeeze=False)
    for name, rows in logs.items():
        tokens = [row["tokens"] / 1e6 for row in rows]
        axes[0][0].plot(tokens, [row["loss"] for row in rows], linewidth=0.9, label=name)
        axes[0][1].plot(tokens, [row["max_over_mean"] for row in rows], linewidth=0.9, label=name)
    axes[0][0].set(xlabel="tokens (millions)", ylabel="loss (nats per token)", title="training loss")
    last = min(rows[-1]["loss"] for rows in logs.values())
    axes[0][0].set_ylim(0.9 * last, 2 * last)
    axes[0][1].set(xlabel="tokens (millions)", ylabel="max ÷ mean", title="load of the busiest expert")
    for plot in axes[0][:2]:
        plot.grid(alpha=0.3)
        plot.legend()
    for plot in axes[0][2:]:
        plot.axis("off")
    for plot, name in zip(axes[1], logs, strict=False):
        share = reports[name]["experts"]["share"]
        image = plot.imshow([[s * len(layer) for s in layer] for layer in share], vmin=0, vmax=4, aspect="auto")
        plot.set(xlabel="expert", ylabel="layer", title=f"{name}: load ÷ mean, held out", yticks=range(len(share)))
        figure.colorbar(image, ax=plot)
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)
