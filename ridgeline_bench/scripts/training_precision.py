"""float32, bfloat16 and float16 in training: what overflows, what is lost, and what scaling the loss mends.

    python -m ridgeline_bench.scripts.training_precision [--steps 300] [--shape embedded] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.training_precision --shape tiny --steps 100 --batch 4     # a CPU without float16
    python -m ridgeline_bench.scripts.training_precision --draw benchmarks/results/training-precision.jsonl

Every run begins with the same weights and reads the same batches; only the type of products differs, and the factor of
the loss: none, one that adapts itself, or a fixed one. 2^28 is too large. 2^-9 shrinks every token's part of a mean
over 256 tokens to that of a mean over 131,072, the step of the embedded model's recipe, so a short run on a CPU shows
what a long one on a GPU would lose. Then the gradients of one more batch are computed in every type and with many
factors, at the weights that float32 reached, and compared with float32's:

    lost       share of the numbers of matrices' gradients that are 0, and are not so in float32
    error      norm of the difference over the norm of float32's gradients
    overflown  share of the numbers that are infinite or NaN
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline.layers.decoder import Decoder
from ridgeline.training.data import PackedTokens
from ridgeline.training.embedded import EMBEDDED, llama_config
from ridgeline.training.objective import NextTokenLoss
from ridgeline.training.pretrain import DTYPES, TrainConfig
from ridgeline_bench.scripts.asked import OneOf, asked, keep
from ridgeline_bench.scripts.small_models import held_out_tokens, losses, new_decoder, sequences, trained, training_text
from ridgeline_bench.svg import Panel, picture

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "training-precision.svg"
RESULTS = Path("benchmarks/results/training-precision.jsonl")
SHAPES: dict[str, Mapping[str, Any]] = {
    "embedded": EMBEDDED.models[0].config,
    "draft": EMBEDDED.models[1].config,
    "tiny": llama_config(hidden=64, intermediate=128, layers=2, heads=1, kv_heads=1),
}
# name → type of products, factor of the loss (None: it adapts)
RUNS: dict[str, tuple[str, float | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "float16, no scaling": ("float16", 1.0),
    "float16, adapting": ("float16", None),
    "float16, fixed at 2^-9": ("float16", 2.0**-9),
    "float16, fixed at 2^28": ("float16", 2.0**28),
}
FACTORS = tuple(2.0**power for power in range(-12, 33, 4))


@dataclass(frozen=True)
class Setup:
    """What all runs share. text: the token file; held_BS1: what is scored after training."""

    config: Mapping[str, Any]
    device: torch.device
    text: Path
    length: int
    batch: int
    steps: int
    lr: float
    held_BS1: Tensor

    def run(self, name: str) -> tuple[dict[str, Any], Decoder]:
        """Train, and return the line of it and the model."""
        dtype, factor = RUNS[name]
        decoder = new_decoder(self.config, self.device)
        train = TrainConfig(
            lr=self.lr, steps=self.steps, dtype=dtype, loss_scale=factor, log_every=max(1, self.steps // 50)
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer = trained(decoder, self.text, self.length, self.batch, train, Path(folder))
            rows = [json.loads(row) for row in (Path(folder) / "log.jsonl").read_text().splitlines()]
        nats = float(losses(decoder, self.held_BS1).double().mean())
        return {
            "run": name, "dtype": dtype, "tokens": [row["tokens"] for row in rows],
            "losses": [finite(row["loss"]) for row in rows], "skipped": trainer.scale.skipped,
            "factor": trainer.scale.factor, "held_out": finite(nats), "seconds": round(trainer.elapsed, 1),
        }, decoder  # fmt: skip

    def probe(self, decoder: Decoder) -> Iterator[dict[str, Any]]:
        """Yield a line for each type and factor on one batch's gradients."""
        data = PackedTokens(self.text, seq_len=self.length, batch_size=self.batch, seed=1)
        tokens_BS1 = torch.from_numpy(data.batch(0)).to(self.device)
        exact = gradients(decoder, tokens_BS1, None, 1.0)
        for dtype, factors in (("bfloat16", (1.0,)), ("float16", FACTORS)):
            for factor in factors:
                found = gradients(decoder, tokens_BS1, DTYPES[dtype], factor)
                yield {"probe": dtype, "factor": factor, **compared(found, exact)}


def finite(value: float) -> float | None:
    """Return the value, or None, which JSON can hold, for one that is infinite or NaN."""
    return value if math.isfinite(value) else None


def gradients(decoder: Decoder, tokens_BS1: Tensor, autocast: torch.dtype | None, factor: float) -> Tensor:
    """Return the gradients of all matrices of the layers, with the factor undone, as one float32 vector."""
    loss = NextTokenLoss(decoder, batch_size=len(tokens_BS1), chunk=32_768, autocast=autocast)(tokens_BS1)
    (loss * factor).backward()
    named = decoder.named_parameters()
    found = [
        p.grad.flatten() / factor for name, p in named if p.grad is not None and p.ndim > 1 and "embed" not in name
    ]
    decoder.zero_grad()
    return torch.cat(found)


def compared(found: Tensor, exact: Tensor) -> dict[str, float | None]:
    """Return how gradients differ from those of float32."""
    return {
        "lost": float(((found == 0) & (exact != 0)).float().mean()),
        "error": finite(float((found - exact).norm() / exact.norm())),
        "overflown": 1 - float(found.isfinite().float().mean()),
    }


Rows = list[list[str]]


def rows_of(lines: list[dict[str, Any]]) -> tuple[Rows, Rows]:
    """Return the rows of runs and those of gradients, behind their heads."""
    runs = [["run", "steps left out", "factor at the end", "loss", "held out"]]
    for x in lines:
        if "run" in x:
            shown = ("not a number" if v is None else f"{v:.4f}" for v in (x["losses"][-1], x["held_out"]))
            runs.append([x["run"], str(x["skipped"]), power(x["factor"]), *shown])
    probes = [["gradients", "factor", "lost", "error", "overflown"]]
    for x in lines:
        if "probe" in x:
            error = "not a number" if x["error"] is None else f"{x['error']:.2%}"
            probes.append([x["probe"], power(x["factor"]), f"{x['lost']:.2%}", error, f"{x['overflown']:.2%}"])
    return runs, probes


def power(factor: float) -> str:
    """Return a power of two as "2^n"."""
    return f"2^{math.log2(factor):.0f}"


def page_tables(lines: list[dict[str, Any]]) -> list[str]:
    """Return the tables of docs/training.md."""
    found = []
    for head, *rows in rows_of(lines):
        ruled = (head, ["---", *["--:"] * (len(head) - 1)], *rows)
        found.append("\n".join(f"| {' | '.join(row)} |" for row in ruled))
    return found


def drawing(lines: list[dict[str, Any]]) -> str:
    """Return the picture of stored lines: losses over tokens, and the error of gradients over the factor."""
    curves = {
        x["run"]: [(a, b) for a, b in zip(x["tokens"], x["losses"], strict=True) if b is not None]
        for x in lines if "run" in x
    }  # fmt: skip
    probes = {
        f"float16: {what}": [(x["factor"], x[what]) for x in lines if x.get("probe") == "float16" and x[what]]
        for what in ("error", "lost", "overflown")
    }
    panels = [
        Panel("training loss, nats per token", "tokens", {name: curve for name, curve in curves.items() if curve}),
        Panel("gradients beside those of float32", "factor of the loss", probes, log_y=True),
    ]
    return picture(panels, "Types of products in training")


def measure(setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """Yield a line for each run, and for each type and factor."""
    exact = None
    for name in RUNS:
        line, decoder = setup.run(name)
        console.print(f"{name}: {line['seconds']} s")
        exact = exact or decoder
        yield line
    assert exact is not None
    yield from setup.probe(exact)


def main() -> None:
    a = asked(
        __doc__, shape=OneOf(SHAPES), steps=300, length=(1024, "tokens of a sequence"), batch=(32, "sequences"),
        lr=4e-3, megabytes=(12.0, "of text"), device="cuda" if torch.cuda.is_available() else "cpu", output=Path,
        quick=(False, "six steps of a tiny model"), draw=(Path, "draw this file's lines"),
    )  # fmt: skip
    if a.quick:
        torch.set_num_threads(1)  # more of them wait for each other longer than they work
        a.shape, a.steps, a.length, a.batch, a.megabytes = "tiny", 6, 64, 2, 1.0
    if a.draw:
        stored = [json.loads(line) for line in a.draw.read_text().splitlines()]
        PICTURE.write_text(drawing(stored))
        print("\n\n".join(page_tables(stored)))
        return
    console, lines = Console(width=120), list[dict[str, Any]]()
    text = training_text(Path(tempfile.gettempdir()) / f"ridgeline-text-{a.megabytes:g}", a.megabytes)
    held_BS1 = sequences(held_out_tokens(), a.length, 32)
    setup = Setup(SHAPES[a.shape], torch.device(a.device), text, a.length, a.batch, a.steps, a.lr, held_BS1)
    for line in measure(setup, console):
        lines.append(line)
        keep(a.output, {"workload": "training precision", "shape": a.shape, "batch": a.batch * a.length, **line})
    for head, *rows in rows_of(lines):
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
