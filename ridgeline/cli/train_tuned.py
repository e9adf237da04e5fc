"""`ridgeline train sft`, `dpo` and `reward`: a model goes on learning from examples, or from preferences."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ridgeline.cli.options import with_records
from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.cli.training_options import (
    Adapter,
    Alpha,
    CheckpointEvery,
    ClipNorm,
    Device,
    Dora,
    LoraDropout,
    Out,
    Rank,
    Rooted,
    Targets,
    Trained,
    Warmup,
    WeightDecay,
    device_of,
    dtype_of,
    imported,
    lora_of,
)
from ridgeline.core.errors import InvalidConfig
from ridgeline.weights.folder import resolve_model


def _take_recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Let a recipe's values stand for the options that the command line does not give. Raise InvalidConfig."""
    if path is None or context.resilient_parsing:
        return path
    names = {parameter.name for parameter in context.command.params} - {"recipe", "help"}
    values = {str(key).replace("-", "_"): value for key, value in _entries(path).items()}
    if unknown := sorted(values.keys() - names):
        near = get_close_matches(unknown[0], sorted(filter(None, names)), 1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        raise InvalidConfig(f"{path} sets {unknown[0]!r}, which is no option of this command{hint}.")
    joined = {key: ",".join(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}
    context.default_map = {**(context.default_map or {}), **joined}
    return path


def _entries(path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            "a recipe needs the package yaml; pip install pyyaml, or give its values as flags."
        ) from error
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfig(f"the recipe {path} cannot be read ({' '.join(str(error).split())}).") from error
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise InvalidConfig(f"{path} must hold names and values, as in `epochs: 3`, none inside another.")
    return found


Recipe = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with values of these options; those given here win.", callback=_take_recipe, is_eager=True
    ),
]


@dataclass(frozen=True)
class DataFlags:
    """The model, its examples, and the folder of results."""

    data: Annotated[Path, typer.Option(help="Examples, as JSON lines.")]
    out: Out
    model: Trained = "embedded"
    held_out: Annotated[Path | None, typer.Option(help="Examples to measure on before and after.")] = None


@dataclass(frozen=True)
class MethodFlags:
    """The numbers that learn."""

    method: Annotated[
        Literal["lora", "qlora", "ia3", "full"],
        typer.Option(
            help="lora, ia3: an adapter in PEFT's form. qlora: one of LoRA beside weights in NF4. full: all weights."
        ),
    ] = "lora"
    rank: Rank = 8
    alpha: Alpha = 16.0
    targets: Targets = "all-linear"
    rslora: Rooted = False
    dora: Dora = False
    lora_dropout: LoraDropout = 0.0
    adapter: Adapter = None


@dataclass(frozen=True)
class StepFlags:
    """The run: how long, and in which steps."""

    pack_tokens: Annotated[int, typer.Option(help="Tokens that run at once; examples are packed into so many.")] = 2048
    packs: Annotated[int, typer.Option(help="Packs of a step, whose gradients are added up.")] = 4
    epochs: Annotated[float, typer.Option(help="How often all examples are read.")] = 1.0
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.", min=1)] = None
    warmup: Warmup = 0.05
    weight_decay: WeightDecay = 0.0
    clip: ClipNorm = 1.0
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Layers run again in the backward pass, which saves memory.")
    ] = False
    paged: Annotated[
        bool,
        typer.Option("--paged", help="The optimizer's moments lie in the host's memory between steps (GPU)."),
    ] = False
    offload: Annotated[
        float,
        typer.Option(help="Share of the layers whose activations wait in the host's memory (GPU).", min=0, max=1),
    ] = 0.0
    checkpoint_every: CheckpointEvery = 50
    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Type of products; auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto"
    seed: Annotated[int, typer.Option(help="Decides the order of examples and an adapter's first numbers.")] = 0


@with_records
def sft(
    *,
    recipe: Recipe = None,
    data: DataFlags,
    method: MethodFlags,
    step: StepFlags,
    lr: Annotated[float, typer.Option(help="Peak learning rate; some 2e-5 suits --method full.", min=0)] = 2e-4,
    loss: Annotated[
        Literal["assistant", "all"], typer.Option(help="Tokens that count: the assistant's, or all.")
    ] = "assistant",
    track: TrackFlags,
) -> None:
    """Fine-tune a model on conversations, or on prompts with completions."""
    _run("sft", data, method, step, track, lr=lr, counted=loss)


@with_records
def dpo(
    *,
    recipe: Recipe = None,
    data: DataFlags,
    method: MethodFlags,
    step: StepFlags,
    lr: Annotated[float, typer.Option(help="Peak learning rate; some 1e-6 suits --method full.", min=0)] = 5e-5,
    loss: Annotated[
        Literal["dpo", "orpo", "kto"],
        typer.Option(help="dpo, orpo: of pairs. kto: of answers that are good or bad, each by itself."),
    ] = "dpo",
    beta: Annotated[
        float, typer.Option(help="Larger ones keep the model closer to what it was; for orpo, the weight of odds.")
    ] = 0.1,
    good_weight: Annotated[float, typer.Option(help="Weight of good answers (kto).", min=0)] = 1.0,
    bad_weight: Annotated[float, typer.Option(help="Weight of bad answers (kto).", min=0)] = 1.0,
    track: TrackFlags,
) -> None:
    """Train a model on preferences: better and worse answers (DPO, ORPO), or good and bad ones (KTO)."""
    _run("dpo", data, method, step, track, lr=lr, loss=loss, beta=beta, weights=(good_weight, bad_weight))


@with_records
def reward(
    *,
    recipe: Recipe = None,
    data: DataFlags,
    method: MethodFlags,
    step: StepFlags,
    lr: Annotated[float, typer.Option(help="Peak learning rate; some 1e-5 suits --method full.", min=0)] = 1e-4,
    process: Annotated[
        bool, typer.Option("--process", help="Score every step of a solution (lines: prompt, completions, labels).")
    ] = False,
    separator: Annotated[str, typer.Option(help="Text behind each step of a solution.")] = "\n",
    center: Annotated[
        float, typer.Option(help="Weight of the square of both scores' sum, which keeps their mean near 0.", min=0)
    ] = 0.0,
    track: TrackFlags,
) -> None:
    """Train a reward model, on pairs of better and worse answers or on solutions in steps."""
    _run("reward", data, method, step, track, lr=lr, process=process, separator=separator, center=center)


def _run(kind: str, data: DataFlags, method: MethodFlags, step: StepFlags, track: TrackFlags, **own: Any) -> None:
    where, folder = device_of(step.device), resolve_model(data.model)
    modules = imported("fine_tune", "recipe")
    config = modules["fine_tune"].FineTuneConfig(
        kind=kind,
        model=folder,
        base=data.model,
        data=data.data,
        held_out=data.held_out,
        out=data.out,
        method=method.method,
        lora=lora_of(method, dora=method.dora, dropout=method.lora_dropout),
        **{**asdict(step), "device": where, "dtype": dtype_of(step.dtype, where)},
        **own,
        command=f"ridgeline train {kind} --model {data.model} --data {data.data.name} --method {method.method}"
        f" --pack-tokens {step.pack_tokens} --packs {step.packs} --lr {own['lr']:g} --seed {step.seed}"
        + (f" --steps {step.steps}" if step.steps else f" --epochs {step.epochs:g}"),
        commit=modules["recipe"].git_commit(),
    )
    parameters = asdict(data), asdict(method), asdict(step), own
    with tracked(track, f"train {kind}", *parameters) as tracker:
        modules["fine_tune"].run(replace(config, tracker=tracker), Console())
