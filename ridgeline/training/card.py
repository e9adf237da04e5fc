"""The model card, made from one report: the model, its training data, its scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PLOT = "loss.png"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source that one package gave. `split` is "train" or the name of a held-out set. Sizes are in bytes of
    text."""

    name: str
    version: str
    licence: str
    split: str
    files: int
    num_bytes: int


def plot_loss(log: Path, target: Path, title: str, field: str = "loss") -> None:
    """Draw the training loss, or another field in nats, against tokens from a training log, as a PNG."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120)
    axes.plot([row["tokens"] / 1e6 for row in rows], [row[field] for row in rows], linewidth=0.8)
    axes.set(xlabel="tokens (millions)", ylabel="training loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    if rows:
        last = rows[-1][field]
        axes.set_ylim(0.9 * min(row[field] for row in rows), min(max(row[field] for row in rows), 2.2 * last))
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def model_card(report: Mapping[str, Any], sources: list[Source]) -> str:
    """Return Markdown with Hugging Face's front matter. `report` is what `embedded.run` returns for one model."""
    return "\n\n".join(
        part
        for part in (
            _FRONT_MATTER.format(family=report["config"]["model_type"]),
            _introduction(report),
            _scores(report),
            _experts(report),
            _training(report),
            _data(report, sources),
            _LIMITS,
        )
        if part
    )


FAMILIES = {"llama": "Llama", "qwen3_moe": "Qwen3-MoE", "glm4_moe": "GLM-4.5-MoE"}
FAMILIES |= {"gla": "gated linear attention", "retnet": "RetNet", "mamba2": "Mamba-2"}
_BALANCING = {
    "none": "Nothing balanced the experts.",
    "loss": "An auxiliary loss of weight {weight} a layer balanced the experts (Fedus et al., arXiv 2101.03961).",
    "correction": "A correction of the scores for the choice, which moves by {rate} a step, balanced the experts (Wang "
    "et al., arXiv 2408.15664).",
}

_FRONT_MATTER = """\
---
license: apache-2.0
language:
- code
library_name: ridgeline
pipeline_tag: text-generation
tags:
- {family}
- python
---"""

_LIMITS = """\
## What it is not

A very small model of one programming language. It continues Python plausibly for a few lines; it follows no
instructions, knows no facts and its code should not be run unread. It can repeat fragments of its training text."""


def _introduction(report: Mapping[str, Any]) -> str:
    config = report["config"]
    if config["model_type"] == "mamba2":
        heads = f"{config['num_heads']} heads of {config['head_dim']} by {config['state_size']}"
        inner = "no feed-forward"
    else:
        heads = (
            f"{config['num_attention_heads']} query and {config['num_key_value_heads']} key/value heads of "
            f"{config['head_dim']}"
        )
        inner = f"feed-forward {config['intermediate_size']}"
    active = ""
    if "experts" in report:
        count = len(report["experts"]["share"][0])
        used = config["num_experts_per_tok"]
        inner = f"{count} experts of {config['moe_intermediate_size']}, of which a token runs {used}"
        active = f" ({report['active_parameters']:,} of them active for a token)"
    return (
        f"# {report['name']}\n\n{report['purpose']}\n\n"
        f"{report['parameters']:,} parameters{active}, {FAMILIES[config['model_type']]} architecture, bfloat16: "
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']} ({inner}), "
        f"{heads}, tied embeddings, context {config['max_position_embeddings']} tokens. "
        f"Byte-level BPE with {config['vocab_size']} tokens; `<|endoftext|>` begins every text and ends it."
    )


def _scores(report: Mapping[str, Any]) -> str:
    lines = [
        "## How well it predicts code it has not seen",
        "Bits per byte (lower is better) of whole packages that were held out, by the bfloat16 weights of this folder"
        + (f", rounded to {report['scheme']} by `ridgeline quantize --method rtn`." if report["scheme"] else "."),
        "| held out | bytes | tokens | this model | `xz -9e` |\n|---|--:|--:|--:|--:|",
    ]
    for name, score in report["held_out"].items():
        lines[-1] += (
            f"\n| {name}: {', '.join(score['names'])} | {score['bytes']:,} | {score['tokens']:,} "
            f"| **{score['bits_per_byte']:.3f}** | {score['xz_bits_per_byte']:.3f} |"
        )
    method = report["evaluation"]
    lines.append(
        f"Every byte of every file is scored, each file on its own behind `<|endoftext|>`, in windows of "
        f"{method['window']} tokens that advance by {method['stride']}; the bits of all tokens are divided by the "
        "UTF-8 bytes of the text. `xz -9e` compresses the same files as one stream."
    )
    return "\n\n".join(lines)


def _experts(report: Mapping[str, Any]) -> str:
    """Return the card's part on how tokens are spread over experts, or nothing for a dense model."""
    if "experts" not in report:
        return ""
    figures, balance = report["experts"], report["balance"]
    rows = "\n".join(
        f"| {layer} | " + " | ".join(f"{share * len(shares):.2f}" for share in shares) + " |"
        for layer, shares in enumerate(figures["share"])
    )
    count = len(figures["share"][0])
    head = "| layer | " + " | ".join(map(str, range(count))) + " |\n|--:|" + "--:|" * count
    return (
        f"## Experts\n\n{_BALANCING[balance['method']].format(**balance)} On the held-out text the entropy of "
        f"their loads is **{figures['load_entropy']:.3f}** bits of {math.log2(count):.3f} (mean over layers), the "
        f"busiest has {figures['max_over_mean']:.2f} times the mean load (mean over layers), and {figures['starved']} "
        f"of {count * len(figures['share'])} have less than a tenth of it. Load of each expert over the mean:\n\n"
        f"{head}\n{rows}"
    )


def _training(report: Mapping[str, Any]) -> str:
    run = report["training"]
    mfu = (
        ""
        if run["mfu"] is None
        else (
            f", {run['mfu']:.1%} model FLOPs utilization of {run['peak_flops'] / 1e12:,.0f} TFLOP/s (the datasheet's "
            "dense bfloat16 peak; only the causal half of attention counted)"
        )
    )
    precision = "float32" if run["dtype"] == "float32" else f"{run['dtype']} autocast over float32 weights"
    return (
        f"## Training\n\n![training loss]({PLOT})\n\n"
        f"AdamW (betas {run['betas'][0]}, {run['betas'][1]}, weight decay {run['weight_decay']}, gradients clipped at "
        f"{run['clip']}), peak learning rate {run['lr']} with a cosine to 0, {run['batch_tokens']:,} tokens per step "
        f"in sequences of {run['seq_len']}: {run['steps']:,} steps, {run['tokens'] / 1e6:,.0f} M tokens "
        f"({run['epochs']:.1f} passes over {run['unique_tokens'] / 1e6:,.1f} M), final loss {run['loss']:.3f} nats per "
        f"token. {precision.capitalize()}, on one {run['device']} (torch {run['torch']}): "
        f"{run['seconds']:,.0f} s at {run['tokens_per_s']:,.0f} tokens/s{mfu}.\n\n"
        f"Made by `{run['command']}` at commit {run['commit']}, seed {run['seed']}."
    )


def _data(report: Mapping[str, Any], sources: list[Source]) -> str:
    total = sum(s.num_bytes for s in sources if s.split == "train")
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(report["dropped_files"].items()))
    rows = "\n".join(
        f"| {s.name} | {s.version} | {s.licence} | {s.split} | {s.files:,} | {s.num_bytes:,} |" for s in sources
    )
    return (
        f"## Data\n\n{total:,} bytes of Python source of the packages below, whose metadata names a permissive licence "
        "(MIT, BSD, Apache-2.0 or PSF, alone or beside others as permissive). Tests, vendored copies, generated files, "
        "tables and files with another licence in their header were left out; so was every file that is equal or "
        "similar to an earlier one (more than half of its runs of four lines), or that shares more than a tenth of "
        f"them with a held-out file. Files dropped: {dropped}.\n\n"
        f"| package | version | licence | part | files | bytes |\n|---|---|---|---|--:|--:|\n{rows}"
    )
