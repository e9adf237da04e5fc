"""A scaling law fitted to small models of ours, and what it predicts of larger ones that it has not seen.

    python -m ridgeline_bench.scripts.scaling_laws --output FILE.jsonl       # one GPU, two minutes
    python -m ridgeline_bench.scripts.scaling_laws --quick                                      # a CPU, seconds
    python -m ridgeline_bench.scripts.scaling_laws --fit benchmarks/results/scaling-laws.jsonl  # without training

Every run is a model of its own with its own learning-rate schedule, as the law wants it (Hoffmann et al., arXiv
2203.15556, appendix): a Llama of so many channels, trained on so many million tokens of this machine's Python source
and scored on held-out modules. Parameters are those of the products that a token runs, the output layer's included.
The law is fitted to the models narrower than --held-out, and predicts that one and the wider ones.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.models import model_config
from ridgeline.perf.scaling_law import Run, ScalingLaw, errors, fit
from ridgeline.training.embedded import llama_config
from ridgeline.training.objective import active_parameters
from ridgeline.training.pretrain import TrainConfig
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.small_models import held_out_tokens, losses, new_decoder, sequences, trained, training_text
from ridgeline_bench.svg import Panel, picture

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "scaling-laws.svg"
HELD_OUT = 384  # channels of the narrowest model that is predicted, and not fitted


def config_of(width: int) -> dict[str, Any]:
    """Return the config of a model of this width, deeper the wider it is. Heads are 64 wide."""
    heads = width // 64
    return llama_config(hidden=width, intermediate=3 * width, layers=1 + heads, heads=heads, kv_heads=heads)


def parameters_of(width: int) -> int:
    return active_parameters(model_config(config_of(width)).spec)


@dataclass(frozen=True)
class Setup:
    """What all runs share: the text, the sequences of a step, and what is scored."""

    device: torch.device
    text: Path
    length: int
    batch: int
    held_BS1: Tensor

    def run(self, width: int, tokens: float) -> dict[str, Any]:
        """Train a model of a width on so many tokens, and return its line."""
        steps = max(1, round(tokens / (self.length * self.batch)))
        decoder = new_decoder(config_of(width), self.device)
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        train = TrainConfig(lr=1.024 / width, steps=steps, warmup=0.05, dtype=dtype, log_every=steps)
        with tempfile.TemporaryDirectory() as folder:
            trainer = trained(decoder, self.text, self.length, self.batch, train, Path(folder))
        nats = float(losses(decoder, self.held_BS1).double().mean())
        return {
            "width": width, "parameters": parameters_of(width), "tokens": steps * self.length * self.batch,
            "loss": nats, "training_loss": trainer.last_loss, "seconds": round(trainer.elapsed, 1),
        }  # fmt: skip


def divided(lines: Iterable[Mapping[str, Any]], held_out: int) -> tuple[list[Run], list[Run]]:
    """Return the (runs to fit, runs to predict)."""
    found = [(line["width"] >= held_out, Run(line["parameters"], line["tokens"], line["loss"])) for line in lines]
    return [run for larger, run in found if not larger], [run for larger, run in found if larger]


def told(law: ScalingLaw, fitted: list[Run], predicted: list[Run]) -> tuple[Table, list[str]]:
    """Return a table of the runs beside the law, and what the law says."""
    table = Table("parameters", "tokens", "loss", "by the law", "error", "")
    for runs, note in ((fitted, ""), (predicted, "predicted")):
        for run in runs:
            law_says = law.loss(run.parameters, run.tokens)
            table.add_row(
                f"{run.parameters:,}", f"{run.tokens:,}", f"{run.loss:.4f}", f"{law_says:.4f}",
                f"{law_says / run.loss - 1:+.2%}", note,
            )  # fmt: skip
    lines = [
        f"L(N, D) = {law.floor:.3f} + {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / D^{law.beta:.3f}",
        f"largest error of the fit: {law.error:.2%}",
    ]
    if predicted:
        lines.append(f"largest error of a prediction: {max(errors(law, predicted)):.2%}")
    for flops in (1e15, 1e16, 1e17):
        try:
            parameters, tokens = law.best(flops)
        except InvalidConfig as error:
            return table, [*lines, str(error)]
        lines.append(
            f"{flops:.0e} FLOPs are spent best on {parameters:,.0f} parameters and {tokens:,.0f} tokens, "
            f"{tokens / parameters:.0f} for each"
        )
    return table, lines


def drawing(lines: list[dict[str, Any]], held_out: int) -> str:
    """Return the picture of stored runs: losses over tokens by size, measured and by the law."""
    law = fit(divided(lines, held_out)[0])
    curves: dict[str, list[tuple[float, float]]] = {}
    by_law: dict[str, list[tuple[float, float]]] = {}
    for line in sorted(lines, key=lambda line: (line["parameters"], line["tokens"])):
        name = f"{line['parameters'] / 1e6:.2f} M parameters" + (", predicted" if line["width"] >= held_out else "")
        curves.setdefault(name, []).append((line["tokens"], line["loss"]))
        by_law.setdefault(name, []).append((line["tokens"], law.loss(line["parameters"], line["tokens"])))
    panels = [
        Panel("held-out loss, nats per token: measured", "tokens of training", curves),
        Panel("by the law, fitted to the smaller models", "tokens of training", by_law),
    ]
    return picture(panels, "Loss over tokens and parameters")


def main() -> None:
    a = asked(
        __doc__, widths=[64, 128, 192, 256, 384], lengths=([4.0, 8.0, 16.0, 32.0], "million tokens of training"),
        held_out=(HELD_OUT, "the narrowest width that is predicted"), length=(1024, "tokens of a sequence"),
        batch=(32, "sequences of a step"), scored=(128, "sequences"), megabytes=(48.0, "of text"),
        device="cuda" if torch.cuda.is_available() else "cpu", output=Path, fit=(Path, "fit this file's runs"),
        quick=(False, "narrow models and few tokens"), draw=(False, "draw docs/images/scaling-laws.svg too"),
    )  # fmt: skip
    if a.quick:
        torch.set_num_threads(1)  # more of them wait for each other longer than they work
        a.widths, a.lengths, a.held_out = [64, 128, 192, 256], [0.0005, 0.001, 0.002], 256
        a.length, a.batch, a.scored, a.megabytes = 64, 2, 4, 1.0
    console, lines = Console(width=120), list[dict[str, Any]]()
    if a.fit:
        lines = [json.loads(line) for line in a.fit.read_text().splitlines()]
    else:
        text = training_text(Path(tempfile.gettempdir()) / f"ridgeline-text-{a.megabytes:g}", a.megabytes)
        held_BS1 = sequences(held_out_tokens(), a.length, a.scored)
        setup = Setup(torch.device(a.device), text, a.length, a.batch, held_BS1)
        for width in a.widths:
            for millions in a.lengths:
                lines.append(setup.run(width, 1e6 * millions))
                console.print(lines[-1], highlight=False)
                keep(a.output, {"workload": "scaling laws", **lines[-1]})
    fitted, predicted = divided(lines, a.held_out)
    table, said = told(fit(fitted), fitted, predicted)
    console.print(table)
    for sentence in said:
        print(sentence)
    if a.draw:
        PICTURE.write_text(drawing(lines, a.held_out))


if __name__ == "__main__":
    main()
