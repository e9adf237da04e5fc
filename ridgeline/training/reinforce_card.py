"""The card of a model or adapter that reinforcement learning made, and the plot of its rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PLOT = "reward.png"
_WHAT = {
    "grpo": "group relative policy optimization (GRPO, Shao et al., arXiv 2402.03300)",
    "rloo": "REINFORCE with a leave-one-out baseline (RLOO, Ahmadian et al., arXiv 2402.14740)",
    "ppo": "proximal policy optimization (PPO, Schulman et al., arXiv 1707.06347)",
}


def plot_rewards(rows: Sequence[Mapping[str, Any]], target: Path, title: str) -> None:
    """Draw the mean reward and the length of answers by step, as a PNG."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120)
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["reward"] for row in rows], linewidth=0.9)
    axes.set(xlabel="updates", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    beside = axes.twinx()
    beside.plot(steps, [row["answer_tokens"] for row in rows], linewidth=0.6, color="tab:gray")
    beside.set_ylabel("tokens of an answer (grey)")
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def reinforce_card(report: Mapping[str, Any]) -> str:
    """Return Markdown with Hugging Face's front matter. `report` is what `reinforce.run` returns."""
    lora = report["lora"]
    front = f"---\nbase_model: {report['base']}\nlibrary_name: {'ridgeline' if lora is None else 'peft'}\n---"
    what = "All weights" if lora is None else f"An adapter (LoRA, rank {lora['rank']}, alpha {lora['alpha']:g})"
    head = f"# {report['base']}, {report['kind']}\n\n{what} of `{report['base']}`, trained on the prompts of "
    head += f"`{report['data']}` by {_WHAT[report['kind']]}."
    table = {
        "rewards": ", ".join(report["rewards"]),
        "updates": f"{report['steps']:,}",
        "tokens of answers": f"{report['tokens']:,}",
        "numbers that learnt": f"{report['trained']:,}",
        "mean reward, first and last tenth": "{:.4f}, {:.4f}".format(*report["reward"]),
        "KL between rollout and trainer, at most": f"{report['kl']:.3g}",
        "staleness of answers, in updates": str(report["staleness"]),
        "time": f"{report['seconds']:.0f} s on {report['device']} in {report['dtype']}",
        "command": f"`{report['command']}` at commit {report['commit']}",
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]
    return "\n\n".join((front, head, "\n".join(lines), f"![the reward by step]({PLOT})"))
