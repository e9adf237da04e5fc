"""`ridgeline train sft`, `dpo` and `reward`: from a model's folder and a file of examples to an adapter, or a folder.

What is written lies in `out`: adapter/ (PEFT's form) or model/, each with its card and the plot of its loss, log.jsonl,
and the checkpoint from which a run goes on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from ridgeline.core.errors import InvalidConfig
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.base import Method
from ridgeline.training.card import PLOT, plot_loss
from ridgeline.training.conversations import Counted, ExampleReader, digest, examples_of
from ridgeline.training.lora import LoraConfig
from ridgeline.training.offload import OffloadedActivations
from ridgeline.training.packs import Packs
from ridgeline.training.preferences import Loss
from ridgeline.training.pretrain import DTYPES
from ridgeline.training.replicas import TrainingReplicas, joined
from ridgeline.training.reward_models import classifier_entries, reward_model
from ridgeline.training.tuned import Objective, PackRunner, check_tunable, loss_chunk, recompute
from ridgeline.training.tuned_card import tuned_card
from ridgeline.training.tuned_items import (
    flops_of,
    judgements,
    mean_loss,
    objective_of,
    read_items,
    share_right,
)
from ridgeline.training.tuning import Tuner, TuningConfig
from ridgeline.training.weight_learner import Base, WeightLearner, check_method
from ridgeline.training.weight_learner import write_tuned as write_tuned
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.loader import read_model_config

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig:
    """The settings of a run.

    kind: sft takes conversations or prompts with completions; dpo takes preferences; reward trains a model of them.
    model, base: the folder of the model, and its name for the card and the adapter.
    data, held_out: files of JSON lines; held_out: None: nothing is measured.
    method: lora, ia3: an adapter beside plain weights; qlora: beside weights in NF4; full: all weights.
    lora: the sizes of an adapter.
    counted: the tokens that the loss counts.
    pack_tokens, packs: the tokens of a pack, which memory follows, and the packs of a step.
    epochs, steps: how long; steps win.
    loss: of dpo: dpo or orpo takes pairs, kto answers that are good or bad.
    beta: dpo's; larger ones keep the model closer to what it was, or weigh orpo's odds.
    weights: of good and of bad answers, for kto.
    process, separator: of reward: every step of a solution is scored; what ends a step.
    center: of reward: the weight of what keeps scores' mean near 0.
    recompute: layers keep their inputs alone, which saves memory and takes a third more time.
    paged: the optimizer's moments lie in the host's memory between steps.
    offload: the share of layers, from the first, whose activations wait in the host's memory for the backward pass.
    """

    kind: Literal["sft", "dpo", "reward"]
    model: Path
    base: str
    data: Path
    out: Path
    held_out: Path | None = None
    device: torch.device
    method: Method = "lora"
    lora: LoraConfig = field(default_factory=LoraConfig)
    counted: Counted = "assistant"
    pack_tokens: int = 2048
    packs: int = 4
    epochs: float = 1.0
    steps: int | None = None
    lr: float = 2e-4
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    loss: Loss = "dpo"
    beta: float = 0.1
    weights: tuple[float, float] = (1.0, 1.0)
    process: bool = False
    separator: str = "\n"
    center: float = 0.0
    recompute: bool = False
    paged: bool = False
    offload: float = 0.0
    dtype: str = "float32"
    checkpoint_every: int = 50
    seed: int = 0
    command: str = ""
    commit: str = "unknown"
    tracker: Tracker = UNTRACKED

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise InvalidConfig(f"fine-tuning multiplies in float32 or bfloat16, got {self.dtype!r}.")
        for name in ("pack_tokens", "packs", "epochs", "lr", "clip", "beta"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidConfig(f"{name} must be a number above 0, got {getattr(self, name):g}.")
        if self.recompute and self.lora.dropout:
            raise InvalidConfig("layers that run again would leave other inputs out; leave out --recompute or dropout.")
        if self.recompute and self.offload:
            raise InvalidConfig(
                "layers that run again keep little that could wait; leave out --recompute or --offload."
            )
        if self.method not in ("lora", "qlora") and (self.lora.dora or self.lora.dropout):
            raise InvalidConfig(f"dora and dropout are for --method lora or qlora, got {self.method}.")


def run(config: FineTuneConfig, console: Console) -> Report:
    """Train and write, with the other processes that torchrun has started, of which the first one writes. Return what
    report.json holds, or in the others nothing. Raise InvalidConfig and ModelLoadError in one sentence."""
    with joined(config.device) as (replicas, device):
        if config.packs % replicas.size:
            raise InvalidConfig(
                f"a step's packs are shared out between {replicas.size} processes; give a multiple of that as --packs, "
                f"not {config.packs}."
            )
        return _run(replace(config, device=device), console, replicas)


def _run(config: FineTuneConfig, console: Console, replicas: TrainingReplicas) -> Report:
    def say(what: str) -> None:
        if what and replicas.rank == 0:
            console.print(what, markup=False, highlight=False, soft_wrap=True)

    base = _base(config)
    config.out.mkdir(parents=True, exist_ok=True)
    reader = ExampleReader.of_folder(config.model, config.counted)
    most = base.model.spec.max_position_embeddings

    def items(path: Path) -> list[Any]:
        found, left_out = read_items(config, reader, path, most)
        say(left_out)
        return found

    data, held_out = items(config.data), None if config.held_out is None else items(config.held_out)
    learner = WeightLearner(base, config.method, config.lora, DTYPES[config.dtype], config.device, config.seed)
    if config.paged and config.device.type != "cuda":
        say("the optimizer's moments are in this machine's memory anyway, so --paged changes nothing on a CPU")
    if config.offload and config.device.type != "cuda":
        say("activations are in this machine's memory anyway, so --offload only takes time on a CPU")
    if config.recompute:
        recompute(learner.decoder)
    if config.offload:
        OffloadedActivations(learner.decoder, config.offload)
    chunk = loss_chunk(config.device, full=config.method == "full")
    runs = PackRunner(learner.decoder, autocast=learner.autocast, chunk=chunk)
    objective = objective_of(config, runs, data)
    checked = None if held_out is None else objective_of(config, runs, held_out)
    lengths = [objective.tokens([index]) for index in range(len(data))]
    packs = Packs(lengths, room=config.pack_tokens, per_step=config.packs, seed=config.seed)
    steps = config.steps or packs.steps(config.epochs)
    names = ("lr", "warmup", "weight_decay", "clip", "checkpoint_every", "paged")
    tuning = TuningConfig(steps=steps, **{name: getattr(config, name) for name in names})
    say(
        f"{len(data):,} examples in {len(packs.packs):,} packs of up to {config.pack_tokens:,} tokens, "
        f"{sum(lengths) / len(packs.packs) / config.pack_tokens:.0%} full; {steps:,} steps, "
        f"{learner.trained:,} numbers learn"
    )
    before = None if checked is None else _measured(checked, held_out)
    thin = None if config.method == "full" else learner.trained
    tuner = Tuner(
        learner.learnt, objective, packs, tuning, config.out,
        identity=_identity(config, data), console=Console(quiet=True) if replicas.rank else console,
        tracker=config.tracker if replicas.rank == 0 else UNTRACKED, flops=flops_of(base.model.spec, data, thin),
        replicas=replicas,
    )  # fmt: skip
    tuner.run()
    after = None if checked is None else _measured(checked, held_out)
    if replicas.rank:
        return {}
    folder = learner.write(config.out, config.base)
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    report = {
        "kind": config.kind,
        "base": config.base,
        "data": config.data.name,
        "examples": len(data),
        "tokens": tuner.tokens,
        "trained": learner.trained,
        "method": config.method,
        "loss_kind": config.loss if config.kind == "dpo" else None,
        "lora": asdict(config.lora) if config.method in ("lora", "qlora") else None,
        "steps": steps,
        "seconds": tuner.elapsed,
        "loss": [rows[0]["loss"], rows[-1]["loss"]],
        "memory": torch.cuda.max_memory_allocated(config.device) if config.device.type == "cuda" else None,
        "held_out": _beside(config.held_out, before, after),
        "device": str(config.device),
        "dtype": config.dtype,
        "command": config.command,
        "commit": config.commit,
    }
    plot_loss(config.out / "log.jsonl", folder / PLOT, f"{config.base}, {config.kind}")
    (folder / "README.md").write_text(tuned_card(report) + "\n")
    (config.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for file in (config.out / "log.jsonl", folder / PLOT, folder / "README.md"):
        config.tracker.artifact(file)
    told = "" if before is None or after is None else f"; held-out loss {before[0]:.4f} before, {after[0]:.4f} after"
    say(f"wrote {folder}{told}")
    return report


def _base(config: FineTuneConfig) -> Base:
    """Return the model that training begins with. Raise InvalidConfig for one that is not trained here."""
    if config.kind == "reward":
        if is_gguf(config.model):
            raise InvalidConfig(f"{config.model} is a GGUF file, of which no reward model is made; give a folder.")
        entries = classifier_entries(config.model, process=config.process)
        base = Base(config.model, *reward_model(config.model, entries), entries)
    else:
        model = read_model_config(config.model)
        base = Base(config.model, model, model)
    if base.model.foreign is not None:
        raise InvalidConfig(f"{config.model} runs through transformers' modules, which are not fine-tuned here.")
    check_tunable(base.model.spec, scores=config.kind != "reward")
    check_method(base, config.method)
    return base


def _measured(objective: Objective, items: list[Any] | None) -> tuple[float, float | None]:
    """Return the mean loss of held-out items, and the share that a reward model judges rightly."""
    count = len(items or ())
    return mean_loss(objective, count), share_right(objective, count)


def _beside(path: Path | None, *found: tuple[float, float | None] | None) -> Report | None:
    """Return the report's lines about held-out items, before and after."""
    if path is None:
        return None
    losses, shares = zip(*(each for each in found if each is not None), strict=True)
    return {"data": path.name, "loss": list(losses), "right": None if None in shares else list(shares)}


def _identity(config: FineTuneConfig, data: list[Any]) -> dict[str, Any]:
    examples = [one for item in data for one in examples_of(item)]
    own = ("loss", "beta", "weights") if config.kind == "dpo" else ("process", "separator", "center")
    return {
        "kind": config.kind,
        "data": digest(examples, judgements(data)),
        **({} if config.kind == "sft" else json.loads(json.dumps({name: getattr(config, name) for name in own}))),
        "base": config.base,
        "method": config.method,
        "lora": json.loads(json.dumps(asdict(config.lora))),
        "pack_tokens": config.pack_tokens,
        "packs": config.packs,
        "dtype": config.dtype,
        "seed": config.seed,
    }
