"""The recipe of the embedded model and its draft: one command turns this machine's Python source into two model
folders.

Fast kernels (and groups of 128 quantized weights) want heads of 64 and widths that are powers of two. The large model
stays under 8 M parameters (16 MB in bfloat16). It is wide rather than deep, because on a CPU every layer costs a fixed
overhead. A vocabulary of 4096 leaves most parameters to the layers. The draft, about a tenth as large, has the same
tokenizer and two layers, the fewest that can copy from context.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ridgeline.core.errors import InvalidConfig
from ridgeline.models import model_config
from ridgeline.training.card import PLOT, model_card, plot_loss
from ridgeline.training.corpus import CorpusConfig
from ridgeline.training.data import PackedTokens
from ridgeline.training.evaluate import bits_per_byte, xz_bits_per_byte
from ridgeline.training.export import read_model, write_model
from ridgeline.training.objective import training_decoder, training_flops_per_token
from ridgeline.training.optimizer import initialize
from ridgeline.training.prepare import Prepared, prepare
from ridgeline.training.pretrain import TrainConfig, Trainer, peak_flops
from ridgeline.training.tokenizer import SEPARATOR_ID

VOCAB_SIZE = 4096
CONTEXT = 2048
STRIDE = 512
FINISH_SECONDS = 20.0  # for the export, evaluation, plot and card of one model

CORPUS = CorpusConfig(
    held_out_modules=("asyncio", "email", "http", "json", "logging", "unittest"),
    held_out_packages=("httpx", "seaborn"),
)

Report = dict[str, Any]


def llama_config(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return a Hugging Face config.json for a Llama with heads of 64 and tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": SEPARATOR_ID,
        "eos_token_id": SEPARATOR_ID,
        "torch_dtype": "bfloat16",
    }


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The recipe of one model. `share` is its part of the training time that is left when its turn comes."""

    name: str
    purpose: str
    config: Mapping[str, Any]
    lr: float
    share: float


MODELS = (
    ModelRecipe(
        name="embedded",
        purpose="The model inside Ridgeline: it lets the engine run, be tested and be measured without a download.",
        config=llama_config(hidden=256, intermediate=1024, layers=7, heads=4, kv_heads=2),
        lr=4e-3,
        share=0.86,
    ),
    ModelRecipe(
        name="embedded-draft",
        purpose="A draft for speculative decoding: the embedded model's small sibling, with the same tokenizer.",
        config=llama_config(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1),
        lr=8e-3,
        share=1.0,
    ),
)


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The settings of a run of the recipe.

    `out` gets <model>.tar, <model>.jsonl and report.json; `work` gets everything in between, checkpoints too.
    `time_budget` is in seconds for the whole run; `steps` for each model replaces it. `batch_tokens` is the tokens per
    step. `command` and `commit` go into the card.
    """

    out: Path
    work: Path
    device: torch.device
    time_budget: float | None = None
    steps: int | None = None
    batch_tokens: int = 131_072
    compile: bool = False
    seed: int = 0
    max_train_bytes: int | None = None
    max_held_out_bytes: int | None = None
    command: str = "ridgeline train pretrain"
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.batch_tokens < CONTEXT:
            raise InvalidConfig(f"batch_tokens must be at least one sequence of {CONTEXT}, got {self.batch_tokens}.")


class _Clock:
    """A clock that prints what happens, in seconds since the run began."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def say(self, what: str) -> None:
        self.console.print(f"[{self.elapsed():5.0f} s] {what}", markup=False, highlight=False)


def run(config: RecipeConfig, console: Console) -> Report:
    """Train, export and evaluate every model of `MODELS`. Return what report.json holds: model name → report."""
    clock = _Clock(console)
    config.out.mkdir(parents=True, exist_ok=True)
    prepared = _prepare(config, clock)
    reports: Report = {}
    for index, recipe in enumerate(MODELS):
        seconds = None
        if config.time_budget is not None:
            left = config.time_budget - clock.elapsed() - FINISH_SECONDS * (len(MODELS) - index)
            seconds = recipe.share * left
        reports[recipe.name] = _make(recipe, config, prepared, seconds, clock)
        (config.out / "report.json").write_text(json.dumps(reports, indent=2) + "\n")
    return reports


def _prepare(config: RecipeConfig, clock: _Clock) -> Prepared:
    clock.say("reading packages, learning the tokenizer, encoding")
    prepared = prepare(
        config.work,
        CORPUS,
        vocab_size=VOCAB_SIZE,
        seed=config.seed,
        max_train_bytes=config.max_train_bytes,
        max_held_out_bytes=config.max_held_out_bytes,
    )
    train = [s for s in prepared.sources if s.split == "train"]
    size, tokens = sum(s.num_bytes for s in train), prepared.tokens.stat().st_size // 2
    clock.say(
        f"{size / 1e6:.1f} MB of {len(train)} packages, {tokens / 1e6:.1f} M tokens ({size / tokens:.2f} bytes each)"
    )
    return prepared


def _make(
    recipe: ModelRecipe, config: RecipeConfig, prepared: Prepared, seconds: float | None, clock: _Clock
) -> Report:
    """Make one model, from initial weights to <out>/<name>.tar, and return its report."""
    clock.say(f"{recipe.name}: training" + ("" if seconds is None else f" for {seconds:.0f} s"))
    trainer = _train(recipe, config, prepared, seconds, clock.console)
    clock.say(f"{recipe.name}: exporting and evaluating")
    folder = config.work / "models" / recipe.name
    write_model(folder, trainer.decoder, recipe.config, prepared.tokenizer)
    report = _report(recipe, config, prepared, trainer) | {"held_out": _score(folder, config.device, prepared)}
    log = config.out / f"{recipe.name}.jsonl"
    log.write_bytes((trainer.folder / "log.jsonl").read_bytes())
    plot_loss(log, folder / PLOT, recipe.name)
    (folder / "README.md").write_text(model_card(report, prepared.sources) + "\n")
    with tarfile.open(config.out / f"{recipe.name}.tar", "w") as tar:
        tar.add(folder, arcname=recipe.name)
    for name, score in report["held_out"].items():
        ours, xz = score["bits_per_byte"], score["xz_bits_per_byte"]
        clock.say(f"{recipe.name}: {ours:.4f} bits per byte of the {name} (xz -9e {xz:.4f})")
    return report


def _train(
    recipe: ModelRecipe, config: RecipeConfig, prepared: Prepared, seconds: float | None, console: Console
) -> Trainer:
    decoder = training_decoder(model_config(recipe.config).spec, torch.float32, config.device)
    initialize(decoder, recipe.config["num_hidden_layers"], config.seed)
    data = PackedTokens(prepared.tokens, seq_len=CONTEXT, batch_size=config.batch_tokens // CONTEXT, seed=config.seed)
    train = TrainConfig(
        lr=recipe.lr,
        steps=config.steps,
        seconds=seconds,
        bf16=config.device.type == "cuda",
        compile=config.compile,
        log_every=min(10, config.steps or 10),
        checkpoint_every=1000 if config.steps else 0,
    )
    trainer = Trainer(decoder, data, train, config.work / recipe.name, console)
    trainer.run()
    return trainer


def _score(folder: Path, device: torch.device, prepared: Prepared) -> Report:
    """Return the bits per byte of the exported weights on each held-out set, beside those of xz."""
    decoder = read_model(folder, device)
    names = {"standard library": CORPUS.held_out_modules, "packages": CORPUS.held_out_packages}
    scores = {}
    for name, texts in prepared.held_out.items():
        score = bits_per_byte(decoder, prepared.tokenizer, texts, window=CONTEXT, stride=STRIDE)
        scores[name] = {
            "names": names[name],
            "bytes": score.num_bytes,
            "tokens": score.num_tokens,
            "bits_per_byte": score.bits_per_byte,
            "xz_bits_per_byte": xz_bits_per_byte(texts),
        }
    return scores


def _report(recipe: ModelRecipe, config: RecipeConfig, prepared: Prepared, trainer: Trainer) -> Report:
    """Return everything that the card says except the scores."""
    train, data = trainer.config, trainer.data
    spec = trainer.decoder.spec
    tokens = trainer.step * config.batch_tokens
    rate = tokens / trainer.elapsed
    peak = peak_flops(config.device)
    return {
        "name": recipe.name,
        "purpose": recipe.purpose,
        "config": dict(recipe.config),
        "parameters": sum(p.numel() for p in trainer.decoder.parameters()),
        "dropped_files": prepared.dropped,
        "evaluation": {"window": CONTEXT, "stride": STRIDE},
        "training": {
            "command": config.command,
            "commit": config.commit or _commit(),
            "seed": config.seed,
            "device": _device_name(config.device),
            "torch": torch.__version__,
            "lr": train.lr,
            "betas": train.betas,
            "weight_decay": train.weight_decay,
            "clip": train.clip,
            "bf16": train.bf16,
            "seq_len": CONTEXT,
            "batch_tokens": data.batch_size * CONTEXT,
            "steps": trainer.step,
            "tokens": tokens,
            "unique_tokens": len(data.tokens),
            "epochs": tokens / len(data.tokens),
            "loss": trainer.last_loss,
            "seconds": trainer.elapsed,
            "tokens_per_s": rate,
            "peak_flops": peak,
            "mfu": rate * training_flops_per_token(spec, CONTEXT) / peak if peak else None,
        },
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
