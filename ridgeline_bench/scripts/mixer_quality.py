"""The quality of Mamba-2 and of a transformer with as many parameters, trained alike, at contexts far beyond training.

    python -m ridgeline_bench.scripts.mixer_quality --output FILE.jsonl           # one GPU, two minutes
    python -m ridgeline_bench.scripts.mixer_quality --quick                       # a CPU: tiny models, 64 to 256 tokens
    python -m ridgeline_bench.scripts.mixer_quality --draw benchmarks/results/mixer-quality.jsonl

Both models are those of `ridgeline train pretrain --recipe mamba2`, trained on the same batches of sequences of 2,048
tokens. Then the same held-out tokens are read as sequences of every length. Perplexity falls where a model makes use of
the text before, and rises where it fails. The transformer is read as it is, with a window of 2,048 tokens, and with
YaRN for the length (see long_context.py). Beside it stand the bytes that a request keeps in bfloat16.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.perf.footprint import kv_bytes
from ridgeline.training.linear import MAMBA2_ATTENTION, MAMBA2_CONFIG
from ridgeline.training.objective import training_decoder
from ridgeline.training.pretrain import TrainConfig
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.long_context import Model, score
from ridgeline_bench.scripts.small_models import held_out_tokens, new_decoder, sequences, trained, training_text
from ridgeline_bench.svg import Panel, picture

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "mixer-quality.svg"
WAYS = ("plain", "in window", "YaRN")  # of reading the transformer at lengths beyond training


@dataclass(frozen=True)
class Setup:
    """The settings of both models. lengths: contexts, ascending; the first is that of training. stream: held-out
    tokens."""

    device: torch.device
    text: Path
    lengths: tuple[int, ...]
    batch: int
    steps: int
    stream: np.ndarray

    def trained(self, config: Mapping[str, Any]) -> tuple[Decoder, float]:
        """Return a model after training, and its seconds."""
        decoder = new_decoder(config, self.device)
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        train = TrainConfig(lr=4e-3, steps=self.steps, dtype=dtype, log_every=min(10, self.steps))
        with tempfile.TemporaryDirectory() as folder:
            trainer = trained(decoder, self.text, self.lengths[0], self.batch, train, Path(folder))
        return decoder, trainer.elapsed

    def lines(
        self, mamba: Mapping[str, Any], attention: Mapping[str, Any], console: Console
    ) -> Iterator[dict[str, Any]]:
        """Yield a line for each model, and for each way to read it at each length."""
        for name, config, ways in (("Mamba-2", mamba, WAYS[:1]), ("transformer", attention, WAYS)):
            decoder, seconds = self.trained(config)
            parameters = sum(p.numel() for p in decoder.parameters())
            tokens = self.steps * self.batch * self.lengths[0]
            console.print(f"{name}: {parameters:,} parameters, {tokens:,} tokens in {seconds:.0f} s")
            yield {
                "trained": name, "parameters": parameters, "tokens": tokens, "seconds": round(seconds, 1),
            }  # fmt: skip
            for way in ways:
                for length in self.lengths:
                    yield self.figure(name, way, length, Model(config, None, self.device), decoder)

    def figure(self, name: str, way: str, length: int, model: Model, decoder: Decoder) -> dict[str, Any]:
        """Return the line of one way and length: nats per token of the same tokens, bytes that a request keeps."""
        config = model.lengthened(way, length) if name == "transformer" else model.config
        read = training_decoder(model_config(config).spec, torch.float32, self.device)
        read.load_state_dict(decoder.state_dict())
        most = self.lengths[-1] * max(1, (len(self.stream) - 1) // self.lengths[-1])
        nats = score(read, sequences(self.stream[: most + 1], length))
        return {
            "model": name, "way": way, "length": length, "nats": nats if math.isfinite(nats) else None,
            "held": kv_bytes(model_config(config).spec, length, "bfloat16"),
        }  # fmt: skip


def rows_of(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Return perplexities by length, and the bytes of a request, behind the head."""
    figures = {(x["model"], x["way"], x["length"]): x for x in lines if "nats" in x}
    lengths = sorted({length for *_, length in figures})
    rows = [["", *(f"{length:,}" for length in lengths)]]
    for model, way in dict.fromkeys((model, way) for model, way, _ in figures):
        found = [figures[model, way, length]["nats"] for length in lengths]
        shown = ("not a number" if nats is None else f"{math.exp(min(nats, 700)):.2f}" for nats in found)
        rows.append([f"{model}, {way}: perplexity", *shown])
    for model in dict.fromkeys(model for model, *_ in figures):
        kept = [figures[model, "plain", length]["held"] / 1e6 for length in lengths]
        rows.append([f"{model}: MB of a request", *(f"{each:.3g}" for each in kept)])
    return rows


def page_table(lines: list[dict[str, Any]]) -> str:
    """Return the table of docs/sequence-mixers.md."""
    head, *rows = rows_of(lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows))


def drawing(lines: list[dict[str, Any]]) -> str:
    """Return the picture of stored lines: perplexity and the bytes of a request over the length."""
    perplexity: dict[str, list[tuple[float, float]]] = {}
    kept: dict[str, list[tuple[float, float]]] = {}
    for x in lines:
        if x.get("nats") is not None:
            name = x["model"] if x["model"] == "Mamba-2" else f"transformer, {x['way']}"
            perplexity.setdefault(name, []).append((x["length"], math.exp(x["nats"])))
            if x["way"] in ("plain", "in window"):
                kept.setdefault(name, []).append((x["length"], x["held"]))
    panels = [
        Panel("perplexity of the same tokens", "context, tokens", perplexity, log_y=True),
        Panel("bytes that a request keeps", "context, tokens", kept, log_y=True),
    ]
    return picture(panels, "Mamba-2 and a transformer of as many parameters, trained at 2,048 tokens")


def main() -> None:
    a = asked(
        __doc__, steps=600, batch=(32, "sequences of a step"), longest=(262_144, "tokens"),
        megabytes=(48.0, "of text"), quick=(False, "tiny models, two steps"),
        device="cuda" if torch.cuda.is_available() else "cpu", output=Path, draw=(Path, "draw this file's lines"),
    )  # fmt: skip
    if a.draw:
        stored = [json.loads(line) for line in a.draw.read_text().splitlines()]
        PICTURE.write_text(drawing(stored))
        print(page_table(stored))
        return
    configs, first = (MAMBA2_CONFIG, MAMBA2_ATTENTION), MAMBA2_ATTENTION["max_position_embeddings"]
    longest, steps, batch, megabytes = a.longest, a.steps, a.batch, a.megabytes
    if a.quick:
        first, longest, steps, batch, megabytes = 64, 256, 2, 2, 1.0
        configs = tuple({**each, "num_hidden_layers": 1, "max_position_embeddings": 64} for each in configs)
    lengths = [first]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    text = training_text(Path(tempfile.gettempdir()) / f"ridgeline-text-{megabytes:g}", megabytes)
    stream = held_out_tokens()[: 1025 if a.quick else None]
    setup = Setup(torch.device(a.device), text, tuple(lengths), batch, steps, stream)
    console, lines = Console(width=140), list[dict[str, Any]]()
    for line in setup.lines(*configs, console):
        lines.append(line)
        keep(a.output, {"workload": "mixer quality", **line})
    head, *rows = rows_of(lines)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
