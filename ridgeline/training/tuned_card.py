"""The card of a fine-tuned model or adapter, made from one report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.training.card import PLOT

_WHAT = {
    "sft": "fine-tuned on the examples of `{data}`",
    "dpo": "trained on the preferences in `{data}` (DPO, Rafailov et al., arXiv 2305.18290)",
}


def tuned_card(report: Mapping[str, Any]) -> str:
    """Return Markdown with Hugging Face's front matter. `report` is what `fine_tune.run` returns."""
    lora = report["lora"]
    front = f"---\nbase_model: {report['base']}\nlibrary_name: {'ridgeline' if lora is None else 'peft'}\n---"
    what = "All weights" if lora is None else f"An adapter (LoRA, rank {lora['rank']}, alpha {lora['alpha']:g})"
    head = f"# {report['base']}, {report['kind']}\n\n{what} of `{report['base']}`, "
    head += _WHAT[report["kind"]].format(data=report["data"]) + "."
    table = {
        "examples": f"{report['examples']:,}",
        "tokens": f"{report['tokens']:,}",
        "steps": f"{report['steps']:,}",
        "numbers that learnt": f"{report['trained']:,}",
        "loss, first and last": "{:.4f}, {:.4f}".format(*report["loss"]),
        "time": f"{report['seconds']:.0f} s on {report['device']} in {report['dtype']}",
        "command": f"`{report['command']}` at commit {report['commit']}",
    }
    if held := report["held_out"]:
        table[f"loss on `{held['data']}`, before and after"] = "{:.4f}, {:.4f}".format(*held["loss"])
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]
    return "\n\n".join((front, head, "\n".join(lines), f"![the loss over tokens]({PLOT})"))
