"""Why rotary positions fail beyond training, and what PI, NTK, YaRN and LongRoPE do about it, on the embedded model.

    python -m ridgeline_bench.scripts.long_context [--longest 16384] [--sequences 4] [--steps 100] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.long_context --quick                        # a CPU, seconds
    python -m ridgeline_bench.scripts.long_context --draw benchmarks/results/long-context.jsonl

The model was trained on sequences of 2,048 tokens. Held-out modules form one stream, and every length reads the same
tokens of it: a context of 4,096 reads them as sequences of 4,096. So perplexity falls with the context where positions
work, and rises where they fail.

    plain       the rotation as it was trained
    in window   plain, but a token sees the last 2,048 alone: large positions, and no distance beyond training
    PI          position interpolation (Chen et al., arXiv 2306.15595): all pairs turn slower by the factor
    NTK         a larger base (bloc97, 2023): the slowest pair turns slower by the factor, the fastest not at all
    YaRN        Peng et al., arXiv 2309.00071: only pairs that turn seldom are slowed; scores are made sharper
    LongRoPE    Ding et al., arXiv 2402.13753: a factor for each pair, found by a search that begins with those above

The factor is that of the length over 2,048. With --steps, each method but "in window" is trained further at the longest
length, and measured at every length with the factor of the longest. --quick reads 512 tokens with random weights of a
tiny model.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline.core.specs.model import AttentionSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.rotary import inverse_frequencies
from ridgeline.models import model_config
from ridgeline.training.embedded import llama_config
from ridgeline.training.objective import training_decoder
from ridgeline.training.pretrain import TrainConfig
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.loader import load_weights
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.small_models import held_out_tokens, losses, new_decoder, sequences, trained, training_text
from ridgeline_bench.svg import Panel, picture

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "long-context.svg"
METHODS = ("plain", "PI", "NTK", "YaRN", "LongRoPE")
TOGETHER = 32  # stretches into which the longest sequence is divided for the loss by position
Factors = tuple[float, ...]


@dataclass(frozen=True)
class Model:
    """A model that was trained at `context` tokens. folder: its weights; None stands for random ones."""

    config: Mapping[str, Any]
    folder: Path | None
    device: torch.device

    @property
    def context(self) -> int:
        return int(self.config["max_position_embeddings"])

    def lengthened(self, method: str, length: int, found: Factors = ()) -> dict[str, Any]:
        """Return the config for contexts of `length` tokens by a method. found: the factors of LongRoPE."""
        config, factor = dict(self.config), length / self.context
        if factor <= 1:
            return config
        original = {"original_max_position_embeddings": self.context}
        match method:
            case "plain":
                return config | {"max_position_embeddings": length}
            case "in window":
                mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
                return config | mistral | {"max_position_embeddings": length, "sliding_window": self.context}
            case "PI":
                return config | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
            case "NTK":
                width = config["head_dim"]
                theta = config["rope_theta"] * factor ** (width / (width - 2))
                return config | {"max_position_embeddings": length, "rope_theta": theta}
            case "YaRN":
                scaling = {"rope_type": "yarn", "factor": factor} | original
                return config | {"max_position_embeddings": length, "rope_scaling": scaling}
            case "LongRoPE":
                lists = {"short_factor": [1.0] * len(found), "long_factor": list(found)}
                scaling = {"rope_type": "longrope"} | original | lists
                return config | {"max_position_embeddings": length, "rope_scaling": scaling}
        raise ValueError(f"no method {method!r}")

    def decoder(self, config: Mapping[str, Any]) -> Decoder:
        """Return the model with its weights in float32 and the rotation of a config."""
        if self.folder is None:
            return new_decoder(config, self.device)
        made = model_config(config)
        decoder = training_decoder(made.spec, torch.float32, self.device)
        load_weights(decoder, self.folder, made.weights)
        return decoder

    def slowed(self, method: str, length: int) -> Factors:
        """Return the factor by which each pair turns slower than in training."""
        plain_y, y = (self._frequencies(self.lengthened(each, length), length) for each in ("plain", method))
        return tuple((plain_y / y).tolist())

    def _frequencies(self, config: Mapping[str, Any], length: int) -> Tensor:
        mixer = model_config(config).spec.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        assert mixer.rope is not None
        return inverse_frequencies(mixer.rope, length)[0]


def score(decoder: Decoder, tokens_BS1: Tensor) -> float:
    """Return the mean nats per token. On a GPU products run in bfloat16."""
    device = next(decoder.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return float(losses(decoder, tokens_BS1).double().mean())


def search(model: Model, length: int, tokens_BS1: Tensor, rounds: int, seed: int = 0) -> Factors:
    """Return the factors of LongRoPE for a length: the best of those of PI, NTK and YaRN, changed in every round.

    A round changes half of the pairs of the best three by up to a fifth, and crosses two of them. As in the paper
    (section 3.2), factors never fall from a fast pair to a slower one. Its unscaled first tokens are left out.
    """
    draw, most = random.Random(seed), 1.25 * length / model.context

    def loss(factors: Factors) -> float:
        return score(model.decoder(model.lengthened("LongRoPE", length, factors)), tokens_BS1)

    def ordered(factors: list[float]) -> Factors:
        risen, least = list[float](), 1.0
        for factor in factors:
            least = min(most, max(least, factor))
            risen.append(least)
        return tuple(risen)

    kept = sorted((loss(each), each) for each in (model.slowed(method, length) for method in METHODS[1:4]))
    for _ in range(rounds):
        changed = [
            ordered([f * draw.uniform(0.8, 1.2) if draw.random() < 0.5 else f for f in each]) for _, each in kept
        ]
        crossed = ordered([draw.choice(pair) for pair in zip(kept[0][1], kept[1][1], strict=True)])
        kept = sorted([*kept, *((loss(each), each) for each in (*changed, crossed))])[:3]
    return kept[0][1]


@dataclass(frozen=True)
class Experiment:
    """The experiment: its model and texts. lengths: ascending, the first is that of training. searched: the text of the
    search, one sequence of the longest length; measured: that of all figures, in as long sequences."""

    model: Model
    lengths: tuple[int, ...]
    searched_BS1: Tensor
    measured_BS1: Tensor
    rounds: int
    steps: int
    batch: int
    megabytes: float
    console: Console

    def cut(self, tokens_BS1: Tensor, length: int) -> Tensor:
        """Return the same tokens in sequences of `length`."""
        return torch.cat([sequences(row.numpy(), length) for row in tokens_BS1])

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield a line for each figure: nats per token of a method at a length, and by position."""
        found = {self.lengths[0]: (1.0,) * (self.model.config["head_dim"] // 2)}
        for length in self.lengths[1:]:
            found[length] = search(self.model, length, self.cut(self.searched_BS1, length), self.rounds)
            yield {"factors": found[length], "method": "LongRoPE", "length": length}
        for method in (*METHODS, "in window"):
            for length in self.lengths:
                config = self.model.lengthened(method, length, found[length])
                yield self.figure(method, length, self.model.decoder(config))
        for method in METHODS if self.steps else ():
            yield from self.further(method, found[self.lengths[-1]])
        for method in ("plain", "YaRN"):
            yield self.by_position(method)

    def figure(self, method: str, length: int, decoder: Decoder, steps: int = 0) -> dict[str, Any]:
        nats = score(decoder, self.cut(self.measured_BS1, length))
        self.console.print(f"{method}, {length:,} tokens, {steps} steps: perplexity {math.exp(min(nats, 700)):.3f}")
        return {"method": method, "length": length, "steps": steps, "nats": nats}

    def further(self, method: str, found: Factors) -> Iterator[dict[str, Any]]:
        """Yield the figures of a model that is trained further at the longest length."""
        longest, started = self.lengths[-1], time.monotonic()
        decoder = self.model.decoder(self.model.lengthened(method, longest, found))
        gpu = self.model.device.type == "cuda"
        train = TrainConfig(
            lr=4e-4, steps=self.steps, dtype="bfloat16" if gpu else "float32", log_every=min(10, self.steps)
        )
        with tempfile.TemporaryDirectory() as folder:
            tokens = training_text(Path(tempfile.gettempdir()) / f"ridgeline-text-{self.megabytes:g}", self.megabytes)
            trained(decoder, tokens, longest, self.batch, train, Path(folder))
        self.console.print(f"{method}: {self.steps} steps in {time.monotonic() - started:.0f} s")
        for length in self.lengths:
            yield self.figure(method, length, decoder, self.steps)

    def by_position(self, method: str) -> dict[str, Any]:
        """Return the nats of the longest sequences by position, in equal stretches."""
        longest = self.lengths[-1]
        decoder = self.model.decoder(self.model.lengthened(method, longest))
        nats_S = losses(decoder, self.measured_BS1).double().mean(0)
        stretches = nats_S.unflatten(0, (TOGETHER, -1)).mean(1).tolist()
        return {"method": method, "length": longest, "positions": stretches}


def experiment(a: Any, console: Console) -> Experiment:
    """Return the experiment that the command line asks for."""
    device = torch.device(a.device)
    tiny = llama_config(hidden=64, intermediate=64, layers=1, heads=1, kv_heads=1)
    config = tiny if a.quick else read_json(EMBEDDED_MODEL / "config.json", required=True)
    config = config | {"max_position_embeddings": a.trained or config["max_position_embeddings"]}
    model = Model(config, None if a.quick else EMBEDDED_MODEL, device)
    lengths = [model.context]
    while lengths[-1] < a.longest:
        lengths.append(2 * lengths[-1])
    all_BS1 = sequences(held_out_tokens(), lengths[-1], a.sequences + 1)
    texts = all_BS1[-1:], all_BS1[: a.sequences]
    return Experiment(model, tuple(lengths), *texts, a.search, a.steps, a.batch, a.megabytes, console)


def rows_of(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Return perplexities: lengths across, methods down, and behind them those that were trained further."""
    figures = {(x["method"], x["length"], x["steps"]): x["nats"] for x in lines if "nats" in x}
    lengths = sorted({length for _, length, _ in figures})
    rows = [["", *(f"{length:,}" for length in lengths)]]
    for steps in sorted({each for *_, each in figures}):
        for method in dict.fromkeys(method for method, _, each in figures if each == steps):
            name = f"{method}, after {steps} steps" if steps else method
            nats = [figures[method, length, steps] for length in lengths]
            rows.append([name, *(f"{math.exp(min(each, 700)):.2f}" for each in nats)])
    return rows


def page_table(lines: list[dict[str, Any]]) -> str:
    """Return the table of docs/long-context.md."""
    head, *rows = rows_of(lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows))


def drawing(lines: list[dict[str, Any]]) -> str:
    """Return the picture of stored lines: loss by position, and perplexity by length."""
    positions = {
        x["method"]: [((n + 0.5) * x["length"] / TOGETHER, value) for n, value in enumerate(x["positions"])]
        for x in lines if "positions" in x
    }  # fmt: skip
    panels = [Panel("nats per token, by position in the text", "position", positions)]
    for steps in sorted({x["steps"] for x in lines if "nats" in x}):
        curves: dict[str, list[tuple[float, float]]] = {}
        for x in lines:
            if x.get("steps") == steps:
                curves.setdefault(x["method"], []).append((x["length"], math.exp(x["nats"])))
        named = f"perplexity, {steps} steps at the longest" if steps else "perplexity, not trained further"
        panels.append(Panel(named, "context, tokens", curves, log_y=True))
    return picture(panels, "The embedded model, trained at 2,048 tokens")


def main() -> None:
    a = asked(
        __doc__, longest=(16_384, "tokens"), sequences=(4, "of the longest length, to measure on"),
        search=(4, "rounds of LongRoPE's search"), steps=(0, "of training further; 0: none"),
        batch=(4, "sequences of a step"), megabytes=(24.0, "of text to train further on"),
        trained=(0, "the context of training, if not the model's own"), quick=(False, "a tiny model, 512 tokens"),
        device="cuda" if torch.cuda.is_available() else "cpu", output=Path, draw=(Path, "draw this file's lines"),
    )  # fmt: skip
    if a.draw:
        lines = [json.loads(line) for line in a.draw.read_text().splitlines()]
        PICTURE.write_text(drawing(lines))
        print(page_table(lines))
        return
    if a.quick:
        torch.set_num_threads(1)  # more of them wait for each other longer than they work
        a.longest, a.trained, a.sequences, a.search = 512, 256, 1, 1
    lines, console = list[dict[str, Any]](), Console(width=120)
    for line in experiment(a, console).lines():
        lines.append(line)
        keep(a.output, {"workload": "long context", **line})
    head, *rows = rows_of(lines)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
