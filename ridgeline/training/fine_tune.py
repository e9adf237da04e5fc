"""`ridgeline train sft` and `dpo`: from a model's folder and a file of examples to an adapter, or a model's folder.

What is written lies in `out`: adapter/ (PEFT's form) or model/, each with its card and the plot of its loss, log.jsonl,
and the checkpoint from which a run goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.base import Method, opened
from ridgeline.training.card import PLOT, plot_loss
from ridgeline.training.conversations import (
    AnswerPair,
    Counted,
    Example,
    ExampleReader,
    digest,
    fitting,
    fitting_pairs,
)
from ridgeline.training.lora import Lora, LoraConfig
from ridgeline.training.objective import needed_flops, training_decoder
from ridgeline.training.packs import Packs
from ridgeline.training.preferences import Preferences, with_reference
from ridgeline.training.pretrain import DTYPES
from ridgeline.training.tuned import LOSS_CHUNK, NextTokens, Objective, PackRunner, check_tunable, mean_nats, recompute
from ridgeline.training.tuned_card import tuned_card
from ridgeline.training.tuning import Tuner, TuningConfig
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.loader import checkpoint_views, export_checkpoint, read_model_config
from ridgeline.weights.quantized.config import method_name

Report = dict[str, Any]
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")  # files not copied


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig:
    """The settings of a run.

    kind: sft takes conversations or prompts with completions; dpo takes pairs.
    model, base: the folder of the model, and its name for the card and the adapter.
    data, held_out: files of JSON lines; held_out: None: nothing is measured.
    method: lora, ia3: an adapter beside plain weights; qlora: beside weights in NF4; full: all weights.
    lora: the sizes of an adapter.
    counted: the tokens that the loss counts.
    pack_tokens, packs: the tokens of a pack, which memory follows, and the packs of a step.
    epochs, steps: how long; steps win.
    beta: dpo's; larger ones keep the model closer to what it was.
    recompute: layers keep their inputs alone, which saves memory and takes a third more time.
    paged: the optimizer's moments lie in the host's memory between steps.
    """

    kind: Literal["sft", "dpo"]
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
    beta: float = 0.1
    recompute: bool = False
    paged: bool = False
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


def run(config: FineTuneConfig, console: Console) -> Report:
    """Train and write. Return what report.json holds. Raise InvalidConfig and ModelLoadError in one sentence."""

    def say(what: str) -> None:
        if what:
            console.print(what, markup=False, highlight=False, soft_wrap=True)

    model = _read_config(config)
    config.out.mkdir(parents=True, exist_ok=True)
    reader = ExampleReader.of_folder(config.model, config.counted)
    most = model.spec.max_position_embeddings
    data = _data(config, reader, config.data, most, say)
    held_out = None if config.held_out is None else _data(config, reader, config.held_out, most, say)
    dtype = DTYPES[config.dtype]
    decoder = opened(config.model, model, config.method, dtype, config.device, quantized=_is_quantized(config.model))
    if config.paged and config.device.type != "cuda":
        say("the optimizer's moments are in this machine's memory anyway, so --paged changes nothing on a CPU")
    torch.manual_seed(config.seed)
    learnt: nn.Module = decoder
    if config.method != "full":
        learnt = Lora(decoder, model, config.lora, config.seed)
    if config.recompute:
        recompute(decoder)
    autocast = dtype if config.method == "full" and dtype != torch.float32 else None
    runs = PackRunner(decoder, autocast=autocast, chunk=LOSS_CHUNK)
    objective, checked = (None if each is None else _objective(config, runs, each) for each in (data, held_out))
    assert objective is not None
    lengths = [objective.tokens([index]) for index in range(len(data))]
    packs = Packs(lengths, room=config.pack_tokens, per_step=config.packs, seed=config.seed)
    steps = config.steps or packs.steps(config.epochs)
    names = ("lr", "warmup", "weight_decay", "clip", "checkpoint_every", "paged")
    tuning = TuningConfig(steps=steps, **{name: getattr(config, name) for name in names})
    trained = sum(each.numel() for each in learnt.parameters() if each.requires_grad)
    say(
        f"{len(data):,} examples in {len(packs.packs):,} packs of up to {config.pack_tokens:,} tokens, "
        f"{sum(lengths) / len(packs.packs) / config.pack_tokens:.0%} full; {steps:,} steps, {trained:,} numbers learn"
    )
    before = None if checked is None or held_out is None else _held_out_loss(runs, checked, held_out)
    tuner = Tuner(
        learnt, objective, packs, tuning, config.out,
        identity=_identity(config, data), console=console, tracker=config.tracker,
        flops=_flops(config, model, data, trained),
    )  # fmt: skip
    tuner.run()
    after = None if checked is None or held_out is None else _held_out_loss(runs, checked, held_out)
    folder = config.out / ("model" if config.method == "full" else "adapter")
    if isinstance(learnt, Lora):
        learnt.export(folder, config.base)
    else:
        write_tuned(folder, decoder, model, config.model)
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    report = {
        "kind": config.kind,
        "base": config.base,
        "data": config.data.name,
        "examples": len(data),
        "tokens": tuner.tokens,
        "trained": trained,
        "method": config.method,
        "lora": None if config.method == "full" else asdict(config.lora),
        "steps": steps,
        "seconds": tuner.elapsed,
        "loss": [rows[0]["loss"], rows[-1]["loss"]],
        "memory": torch.cuda.max_memory_allocated(config.device) if config.device.type == "cuda" else None,
        "held_out": None if config.held_out is None else {"data": config.held_out.name, "loss": [before, after]},
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
    say(f"wrote {folder}" + ("" if before is None else f"; held-out loss {before:.4f} before, {after:.4f} after"))
    return report


def _read_config(config: FineTuneConfig) -> ModelConfig:
    if config.method == "full" and _is_quantized(config.model):
        raise InvalidConfig(
            f"{config.model} holds quantized weights, which --method full cannot write; train an adapter with "
            "--method lora, or give the model as it was before."
        )
    model = read_model_config(config.model)
    if model.foreign is not None:
        raise InvalidConfig(f"{config.model} runs through transformers' modules, which are not fine-tuned here.")
    check_tunable(model.spec)
    return model


def _is_quantized(folder: Path) -> bool:
    return is_gguf(folder) or method_name(folder) is not None


def _flops(config: FineTuneConfig, model: ModelConfig, data: list[Any], trained: int) -> Callable[[list[int]], float]:
    """Return a function that returns the FLOPs that a pack needs."""
    thin = None if config.method == "full" else trained

    def needed(pack: list[int]) -> float:
        each = [one for index in pack for one in _examples_of(data[index])]
        lengths, scored = [len(one.tokens) - 1 for one in each], sum(sum(one.counted) for one in each)
        return needed_flops(model.spec, lengths, scored, thin=thin)

    return needed


def _examples_of(item: Example | AnswerPair) -> list[Example]:
    return [item] if isinstance(item, Example) else list(item)


def _data(config: FineTuneConfig, reader: ExampleReader, path: Path, most: int, say: Any) -> list[Any]:
    """Return the examples or pairs of a file that fit into a pack, with at most `most` tokens each."""
    kept: list[Any]
    if config.kind == "dpo":
        kept, left_out = fitting_pairs(reader.pairs(path), config.pack_tokens, most, path)
    else:
        kept, left_out = fitting(reader.examples(path), min(config.pack_tokens, most), path)
    say(left_out)
    return kept


def _objective(config: FineTuneConfig, runs: PackRunner, data: list[Any]) -> Objective:
    if config.kind == "dpo":
        return Preferences(runs, with_reference(runs, data), config.beta)
    return NextTokens(runs, data)


def _held_out_loss(runs: PackRunner, objective: Objective, data: list[Any]) -> float:
    if isinstance(objective, NextTokens):
        return mean_nats(runs, data)
    with torch.no_grad():
        return sum(float(objective.sum([index])) for index in range(len(data))) / len(data)


def _identity(config: FineTuneConfig, data: list[Any]) -> dict[str, Any]:
    examples = [one for item in data for one in _examples_of(item)]
    return {
        "kind": config.kind,
        "data": digest(examples),
        "base": config.base,
        "method": config.method,
        "lora": json.loads(json.dumps(asdict(config.lora))),
        "pack_tokens": config.pack_tokens,
        "packs": config.packs,
        "beta": config.beta,
        "dtype": config.dtype,
        "seed": config.seed,
    }


def write_tuned(folder: Path, decoder: Decoder, model: ModelConfig, source: Path) -> None:
    """Write all weights, in the dtypes of the model that they began as, and copy that model's other files."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = training_decoder(model.spec, getattr(torch, model.dtype), torch.device("meta"))
    views = checkpoint_views(meta, model.weights)
    tensors = export_checkpoint(decoder, model.weights)
    rounded = {name: each.to("cpu", views[name].tensor.dtype).contiguous() for name, each in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.suffix not in (".md", ".png"):
            shutil.copyfile(file, folder / file.name)
