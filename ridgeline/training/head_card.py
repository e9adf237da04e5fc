"""The card of what drafts for a model, made from one report: what it is, how many of its drafts are right, how it was
trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.training.card import PLOT

Report = Mapping[str, Any]

_FRONT_MATTER = """\
---
license: apache-2.0
language:
- code
library_name: ridgeline
base_model: {target}
tags:
- speculative-decoding
- {kind}
- python
---"""

_WHAT = {
    "eagle": "A head of EAGLE-3 (Li et al., arXiv 2503.01840) that drafts for the model `{target}`: one layer that "
    "reads what the model's layers {taps} return (counted from 0) and the embedding of the next token. Embedding and "
    "output matrix are the model's.",
    "dflash": "A head of DFlash (Chen et al., arXiv 2602.06036) that drafts for the model `{target}`: of all tokens "
    "before it reads what the model's layers {taps} return (counted from 0), and guesses a block of tokens at once. "
    "Embedding and output matrix are the model's.",
    "medusa": "Heads of Medusa (Cai et al., arXiv 2401.10774) that draft for the model `{target}`: one residual block "
    "each, behind the model's final norm. The output matrix is the model's.",
    "draft": "A smaller model that drafts for the model `{target}`: `{start}`, trained further on that model's "
    "distributions.",
}

_LIMITS = """\
## What it is not

It writes no text of its own. Its drafts are verified by the model, so the text is the model's with it or without."""


def head_card(report: Report) -> str:
    """Return Markdown with Hugging Face's front matter. `report` is what `head_recipe.run` returns for one name."""
    what = _WHAT[report["kind"]].format(
        target=report["target"], start=report["start"], taps=", ".join(map(str, report["taps"]))
    )
    size = f"{report['parameters']:,} parameters, {report['bytes']:,} bytes in bfloat16."
    if report["start"] and report["kind"] != "draft":
        size += f" It began as `{report['start']}`, and the figures below are of its further training."
    if changed := report.get("target_nats"):
        was = ", ".join(f"{before:.4f} and now {after:.4f} on the {name}" for name, (before, after) in changed.items())
        size += (
            f" Both learnt together (Medusa-2), so they draft for `{report['name']}-target` beside this folder alone. "
            f"The model's loss was {was}, in nats per token."
        )
    head = f"# {report['name']}\n\n{what}\n\n{size}"
    return "\n\n".join((_FRONT_MATTER.format(**report), head, _scores(report), _training(report), _LIMITS))


def _scores(report: Report) -> str:
    method, drafts = report["evaluation"], max(row["drafts"] for row in _all(report["held_out"]))
    places = " | ".join(f"first {index + 1}" if index else "first" for index in range(drafts))
    lines = [
        "## How many of its drafts are right",
        "Tokens that a step brings which verifies that many drafts, and the share of steps in which the first draft, "
        "the first two and so on were right. The text is what the model writes, with its likeliest tokens, behind "
        "files that were held out from its training and from this one.",
        f"| held out | drafts | tokens a step | {places} |\n|---|--:|--:|" + "--:|" * drafts
        + "".join(_row(name, row, drafts) for name, rows in report["held_out"].items() for row in rows),
    ]  # fmt: skip
    if before := report.get("before"):
        lines += [
            f"Before training, `{report['start']}` reached:",
            f"| held out | drafts | tokens a step | {places} |\n|---|--:|--:|" + "--:|" * drafts
            + "".join(_row(name, row, drafts) for name, rows in before.items() for row in rows),
        ]  # fmt: skip
    lines.append(
        f"{method['requests']} prompts of {method['prompt']} tokens of each set, cut out at random, and "
        f"{method['continuation']} tokens behind each."
    )
    return "\n\n".join(lines)


def _all(held_out: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for rows in held_out.values() for row in rows]


def _row(name: str, row: Mapping[str, Any], width: int) -> str:
    shares = [f"{share:.2f}" for share in row["accepted"]] + [""] * (width - row["drafts"])
    return f"\n| {name} | {row['drafts']} | **{row['tokens_per_step']:.2f}** | " + " | ".join(shares) + " |"


def _training(report: Report) -> str:
    run = report["training"]
    threads = f"{run['threads']} thread" + ("s" if run["threads"] > 1 else "")
    losses = ", ".join(f"{loss:.3f}" for loss in report["losses"])
    passes, decay = run["passes"], run["decay"]
    weighted = f"Each of {passes} tokens behind a position counts {decay} times the one before." if passes > 1 else ""
    temperatures = " and ".join(f"{each:g}" for each in run["temperatures"])
    return (
        f"## Training\n\n![training loss]({PLOT})\n\n"
        f"The loss is the divergence from the model's distribution (Kullback and Leibler's, in nats). {weighted} The "
        f"last steps' were {losses}; the curve is that of the first. The text is {run['tokens']:,} tokens of Python "
        f"source of the standard library and of permissively licensed packages, of which the model itself wrote "
        f"{run['own_tokens']:,} (at the temperatures {temperatures}).\n\n"
        f"AdamW (betas {run['betas'][0]}, {run['betas'][1]}, weight decay {run['weight_decay']}, gradients clipped at "
        f"{run['clip']}), peak learning rate {run['lr']} with a cosine to 0, {report['steps']:,} steps, "
        f"{report['guesses']:,} guesses in {report['seconds']:,.0f} s on one {run['device']}, {threads} "
        f"(torch {run['torch']}).\n\n"
        f"Made by `{run['command']}` at commit {run['commit']}, seed {run['seed']}."
    )
