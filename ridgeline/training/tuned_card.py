"""The card of a fine-tuned model or adapter, made from one report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.training.card import PLOT

_WHAT = {
    "sft": "fine-tuned on the examples of `{data}`",
    "dpo": "trained on the preferences in `{data}`",
    "reward": "made a reward model by the judgements in `{data}`",
}
_LOSSES = {
    "dpo": " (DPO, Rafailov et al., arXiv 2305.18290)",
    "orpo": " (ORPO, Hong et al., arXiv 2403.07691)",
    "kto": " (KTO, Ethayarajh et al., arXiv 2402.01306)",
    None: "",
}


def tuned_card(report: Mapping[str, Any]) -> str:
    """Return Markdown with Hugging Face's front matter. `report` is what `fine_tune.run` returns."""
    lora = report["lora"]
    method, whole = report["method"], report["method"] == "full" or report["kind"] == "reward"
    front = f"---\nbase_model: {report['base']}\nlibrary_name: {'ridgeline' if whole else 'peft'}\n---"
    sizes = "IA3" if lora is None else f"LoRA, rank {lora['rank']}, alpha {lora['alpha']:g}"
    beside = " beside weights in NF4" if method == "qlora" else ""
    what = "All weights" if method == "full" else f"An adapter ({sizes}{beside})"
    head = f"# {report['base']}, {report['kind']}\n\n{what} of `{report['base']}`, "
    head += _WHAT[report["kind"]].format(data=report["data"]) + _LOSSES[report["loss_kind"]] + "."
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
        if held["right"]:
            table["judged rightly there, before and after"] = "{:.1%}, {:.1%}".format(*held["right"])
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]
    return "\n\n".join((front, head, "\n".join(lines), f"![the loss over tokens]({PLOT})"))
