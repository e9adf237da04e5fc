"""The machinery of a recipe: one command turns this machine's Python source into model folders with their cards."""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.dense import recurs
from ridgeline.models import model_config
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.aware import make_aware
from ridgeline.training.balance import NO_BALANCE, Balance, experts_of, load_figures
from ridgeline.training.card import FAMILIES, PLOT, model_card, plot_loss
from ridgeline.training.corpus import CorpusConfig
from ridgeline.training.data import PackedTokens
from ridgeline.training.evaluate import bits_per_byte, xz_bits_per_byte
from ridgeline.training.export import read_model, write_model
from ridgeline.training.objective import active_parameters, training_decoder, training_flops_per_token
from ridgeline.training.optimizer import initialize
from ridgeline.training.prepare import Prepared, prepare
from ridgeline.training.pretrain import TrainConfig, Trainer, peak_flops
from ridgeline.training.replicas import alone
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.loader import load_weights

FINISH_SECONDS = 20.0  # for the export, evaluation, plot and card of one model

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The recipe of one model.

    config: a Hugging Face config.json.
    share: its part of the training time that is left when its turn comes.
    balance: how its experts are kept equally busy, if it has any.
    start: the folder of a model whose weights it begins with; None: random weights.
    scheme, group: see TrainConfig.
    """

    name: str
    purpose: str
    config: Mapping[str, Any]
    lr: float
    share: float
    balance: Balance = NO_BALANCE
    start: Path | None = None
    scheme: str | None = None
    group: int = 128


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Models that are made from one corpus.

    context: tokens of a training sequence and of a window of the evaluation, which advances by `stride`.
    tokenizer: the folder of a model whose tokenizer is taken; None learns one of `vocab_size` ids.
    """

    models: tuple[ModelRecipe, ...]
    corpus: CorpusConfig
    vocab_size: int
    context: int
    stride: int
    tokenizer: Path | None = None


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The settings of a run of a recipe.

    out: gets <model>.tar, <model>.jsonl and report.json.
    work: gets everything in between, checkpoints too.
    time_budget: seconds for the whole run. `steps` for each model replaces it.
    batch_tokens: tokens per step.
    dtype, loss_scale: see TrainConfig (default: bfloat16 on a GPU, float32 on a CPU).
    command, commit: go into the card.
    tracker: gets every row of the logs, the scores, and the files of `out`.
    """

    recipe: Recipe
    out: Path
    work: Path
    device: torch.device
    time_budget: float | None = None
    steps: int | None = None
    batch_tokens: int = 131_072
    compile: bool = False
    dtype: str | None = None
    loss_scale: float | None = None
    seed: int = 0
    max_train_bytes: int | None = None
    max_held_out_bytes: int | None = None
    command: str = "ridgeline train pretrain"
    commit: str | None = None
    tracker: Tracker = UNTRACKED

    def __post_init__(self) -> None:
        if self.batch_tokens < self.recipe.context:
            raise InvalidConfig(
                f"batch_tokens must be at least one sequence of {self.recipe.context}, got {self.batch_tokens}."
            )


def continued(recipe: Recipe, start: Path, lr: float) -> Recipe:
    """Return the recipe that trains the model in a folder further, on the same corpus and with its own tokenizer.
    Packages are not held out, since that model may have read them. Raise ModelLoadError, and InvalidConfig for a model
    of another kind than recipes make."""
    config = read_json(start / "config.json", required=True)
    if config.get("model_type") not in FAMILIES or "head_dim" not in config:
        raise InvalidConfig(
            f"{start} is of the kind {config.get('model_type')!r}, which no recipe here makes, so none trains it "
            f"further; give a model of {', '.join(FAMILIES)} that `ridgeline train pretrain` made."
        )
    context = min(recipe.context, config["max_position_embeddings"])
    model = ModelRecipe(
        name=start.name, purpose=f"{start.name}, trained further.", config=config, lr=lr, share=1.0, start=start
    )
    return replace(
        recipe,
        models=(model,),
        corpus=replace(recipe.corpus, held_out_packages=()),
        context=context,
        stride=min(recipe.stride, context // 4),
        tokenizer=start,
    )


def quantized(recipe: Recipe, scheme: str, group: int) -> Recipe:
    """Return the recipe with all models trained for a scheme."""
    models = (replace(m, name=f"{m.name}-{scheme}", scheme=scheme, group=group) for m in recipe.models)
    return replace(recipe, models=tuple(models))


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
    """Train, export and evaluate every model of the recipe. Return what report.json holds: model name → report."""
    alone("models of a recipe are trained")
    clock = _Clock(console)
    config.out.mkdir(parents=True, exist_ok=True)
    prepared = _prepare(config, clock)
    reports: Report = {}
    models = config.recipe.models
    for index, recipe in enumerate(models):
        seconds = None
        if config.time_budget is not None:
            left = config.time_budget - clock.elapsed() - FINISH_SECONDS * (len(models) - index)
            seconds = recipe.share * left
        reports[recipe.name] = _make(recipe, config, prepared, seconds, clock)
        (config.out / "report.json").write_text(json.dumps(reports, indent=2) + "\n")
    config.tracker.artifact(config.out / "report.json")
    return reports


def _prepare(config: RecipeConfig, clock: _Clock) -> Prepared:
    clock.say("reading packages, encoding")
    prepared = prepare(
        config.work,
        config.recipe.corpus,
        vocab_size=config.recipe.vocab_size,
        tokenizer=config.recipe.tokenizer,
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
    report = _report(recipe, config, prepared, trainer) | _score(folder, recipe, config, prepared)
    log = config.out / f"{recipe.name}.jsonl"
    log.write_bytes((trainer.folder / "log.jsonl").read_bytes())
    plot_loss(log, folder / PLOT, recipe.name)
    (folder / "README.md").write_text(model_card(report, prepared.sources) + "\n")
    with tarfile.open(config.out / f"{recipe.name}.tar", "w") as tar:
        tar.add(folder, arcname=recipe.name)
    config.tracker.artifact(log)  # the card and the curve of each model have one name, and are in its archive
    config.tracker.artifact(config.out / f"{recipe.name}.tar")
    for name, score in report["held_out"].items():
        ours, xz = score["bits_per_byte"], score["xz_bits_per_byte"]
        config.tracker.metrics(trainer.step, {f"{recipe.name}/bits per byte of the {name}": ours})
        clock.say(f"{recipe.name}: {ours:.4f} bits per byte of the {name} (xz -9e {xz:.4f})")
    return report


def _train(
    recipe: ModelRecipe, config: RecipeConfig, prepared: Prepared, seconds: float | None, console: Console
) -> Trainer:
    decoder = training_decoder(model_config(recipe.config).spec, torch.float32, config.device)
    if recipe.start is None:
        initialize(decoder, recipe.config["num_hidden_layers"], config.seed)
    else:
        load_weights(decoder, recipe.start, model_config(recipe.config).weights)
    context = config.recipe.context
    data = PackedTokens(prepared.tokens, seq_len=context, batch_size=config.batch_tokens // context, seed=config.seed)
    train = TrainConfig(
        lr=recipe.lr,
        steps=config.steps,
        seconds=seconds,
        dtype=config.dtype or ("bfloat16" if config.device.type == "cuda" else "float32"),
        loss_scale=config.loss_scale,
        # Experts read counts back to the host, and recurrent ops the rows
        compile=config.compile and not experts_of(decoder) and not recurs(decoder.spec),
        balance=recipe.balance,
        scheme=recipe.scheme,
        group=recipe.group,
        log_every=min(10, config.steps or 10),
        checkpoint_every=1000 if config.steps else 0,
    )
    trainer = Trainer(decoder, data, train, config.work / recipe.name, console, config.tracker)
    trainer.run()
    return trainer


def _score(folder: Path, recipe: ModelRecipe, config: RecipeConfig, prepared: Prepared) -> Report:
    """Return the bits per byte of the exported weights, rounded if the recipe has a scheme, on each held-out set,
    beside those of xz, and how the experts shared the tokens there."""
    decoder = read_model(folder, config.device)
    if recipe.scheme is not None:
        make_aware(decoder, recipe.scheme, recipe.group)
    corpus, context, stride = config.recipe.corpus, config.recipe.context, config.recipe.stride
    names = {"standard library": corpus.held_out_modules, "packages": corpus.held_out_packages}
    scores = {}
    for name, texts in prepared.held_out.items():
        score = bits_per_byte(decoder, prepared.tokenizer, texts, window=context, stride=stride)
        scores[name] = {
            "names": names[name],
            "bytes": score.num_bytes,
            "tokens": score.num_tokens,
            "bits_per_byte": score.bits_per_byte,
            "xz_bits_per_byte": xz_bits_per_byte(texts),
        }
    mixtures = experts_of(decoder)
    if not mixtures:
        return {"held_out": scores}
    counts_LE = torch.stack([layer.tally_E for layer in mixtures]).cpu()
    share_LE = counts_LE / counts_LE.sum(1, keepdim=True)
    return {"held_out": scores, "experts": load_figures(counts_LE) | {"share": share_LE.tolist()}}


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
        "active_parameters": active_parameters(spec),
        "balance": asdict(recipe.balance),
        "start": None if recipe.start is None else recipe.start.name,
        "scheme": recipe.scheme,
        "evaluation": {"window": config.recipe.context, "stride": config.recipe.stride},
        "training": {
            "command": config.command,
            "commit": config.commit or git_commit(),
            "seed": config.seed,
            "device": device_name(config.device),
            "torch": torch.__version__,
            "lr": train.lr,
            "betas": train.betas,
            "weight_decay": train.weight_decay,
            "clip": train.clip,
            "dtype": train.dtype,
            "seq_len": data.seq_len,
            "batch_tokens": data.batch_size * data.seq_len,
            "steps": trainer.step,
            "tokens": tokens,
            "unique_tokens": len(data.tokens),
            "epochs": tokens / len(data.tokens),
            "loss": trainer.last_loss,
            "seconds": trainer.elapsed,
            "tokens_per_s": rate,
            "peak_flops": peak,
            "mfu": rate * training_flops_per_token(spec, data.seq_len) / peak if peak else None,
        },
    }


def device_name(device: torch.device) -> str:
    """Return the device's name for cards."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def git_commit() -> str:
    """Return the short name of the commit that this code lies at, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
