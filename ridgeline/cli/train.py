"""`ridgeline train`: training from the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ridgeline.cli import train_heads, train_memory, train_rewarded, train_sizes, train_tuned
from ridgeline.cli.options import with_records
from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.cli.training_options import bytes_of, device_of, imported
from ridgeline.core.errors import InvalidConfig
from ridgeline.weights.folder import resolve_model

app = typer.Typer(help="Train models, and what drafts for them.", no_args_is_help=True)
app.command()(train_heads.eagle)
app.command()(train_heads.dflash)
app.command()(train_heads.medusa)
app.command()(train_heads.draft)
app.command()(train_sizes.sizes)
app.command()(train_memory.memory)
app.command()(train_tuned.sft)
app.command()(train_tuned.dpo)
app.command()(train_tuned.reward)
app.command()(train_rewarded.grpo)
app.command()(train_rewarded.rloo)
app.command()(train_rewarded.ppo)


@app.callback()
def train() -> None:
    """Train models, and what drafts for them."""


@dataclass(frozen=True)
class RunFlags:
    """The run: how long, where, and in which steps."""

    work: Annotated[
        Path | None, typer.Option(help="Folder for tokens and checkpoints; a run goes on from what lies there.")
    ] = None
    time_budget: Annotated[float | None, typer.Option(help="Seconds for the whole run.", min=1)] = None
    steps: Annotated[int | None, typer.Option(help="Steps per model, instead of a time budget.", min=1)] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto"
    batch_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 131_072
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile; default: on a GPU.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of products; auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto"
    loss_scale: Annotated[
        float | None, typer.Option(help="Factor of the loss in float16; default: it adapts. 1: none.")
    ] = None
    seed: Annotated[int, typer.Option(help="Decides order, sample and initial weights.")] = 0


@dataclass(frozen=True)
class TextFlags:
    """The amount of text."""

    max_train_mb: Annotated[float | None, typer.Option(help="Train on about this much text (a trial run).")] = None
    max_held_out_mb: Annotated[float | None, typer.Option(help="Evaluate about this much per held-out set.")] = None


@dataclass(frozen=True)
class FurtherFlags:
    """Training of a model that there is, or for a scheme."""

    start: Annotated[
        str, typer.Option("--from", help="Train this model further (folder, or embedded) instead of the recipe's own.")
    ] = ""
    lr: Annotated[float, typer.Option(help="Peak learning rate of a model that is trained further.", min=0)] = 4e-4
    quantize: Annotated[
        str, typer.Option(help="Train for this scheme of `ridgeline quantize`: weights are rounded in every step.")
    ] = ""
    group: Annotated[int, typer.Option(help="Weights that share a scale, for schemes with groups.")] = 128


@app.command()
@with_records
def pretrain(
    out: Annotated[Path, typer.Option(help="Folder for the finished models, their logs and report.json.")],
    recipe: Annotated[
        Literal["embedded", "mixture", "gla", "retnet", "mamba2"],
        typer.Option(
            help="embedded: the embedded model and its draft. mixture: three mixtures of experts. gla, retnet, "
            "mamba2: a model of linear attention, gated or with retention, or of Mamba-2, and attention beside it."
        ),
    ] = "embedded",
    *,
    run: RunFlags,
    text: TextFlags,
    further: FurtherFlags,
    track: TrackFlags,
    commit: Annotated[str | None, typer.Option(help="Recorded in the card; default: what git says.")] = None,
) -> None:
    """Train the models that ship with Ridgeline from the Python source on this machine."""
    time_budget, steps, compiled = run.time_budget, run.steps, run.compile
    start, quantize, group = further.start, further.quantize, further.group
    if (time_budget is None) == (steps is None):
        raise InvalidConfig("give either --time-budget or --steps.")
    if start and recipe != "embedded":
        raise InvalidConfig("--from trains one model further, so --recipe does not go with it.")
    modules = imported("recipe", "embedded", "mixture", "linear")
    where = device_of(run.device)
    flags = {
        "recipe": "" if recipe == "embedded" else recipe,
        "from": start,
        "quantize": quantize,
        "group": group if quantize else "",
        "dtype": "" if run.dtype == "auto" else run.dtype,
        "loss-scale": "" if run.loss_scale is None else f"{run.loss_scale:g}",
    }
    named = "".join(f" --{flag} {value}" for flag, value in flags.items() if value)
    of_module = {"embedded": "embedded", "mixture": "mixture", "gla": "linear", "retnet": "linear", "mamba2": "linear"}
    chosen = getattr(modules[of_module[recipe]], recipe.upper())
    if start:
        chosen = modules["recipe"].continued(chosen, resolve_model(start), further.lr)
    if quantize:
        chosen = modules["recipe"].quantized(chosen, quantize, group)
    config = modules["recipe"].RecipeConfig(
        recipe=chosen,
        out=out,
        work=run.work or out / "work",
        device=where,
        time_budget=time_budget,
        steps=steps,
        batch_tokens=run.batch_tokens,
        compile=where.type == "cuda" if compiled is None else compiled,
        dtype=None if run.dtype == "auto" else run.dtype,
        loss_scale=run.loss_scale,
        seed=run.seed,
        max_train_bytes=bytes_of(text.max_train_mb),
        max_held_out_bytes=bytes_of(text.max_held_out_mb),
        command=f"ridgeline train pretrain{named}"
        + (f" --steps {steps}" if steps else f" --time-budget {time_budget:g}"),
        commit=commit,
    )
    parameters = asdict(run), asdict(text), asdict(further), {"commit": commit or modules["recipe"].git_commit()}
    with tracked(track, f"train pretrain {recipe}", *parameters) as tracker:
        modules["mixture" if recipe == "mixture" else "recipe"].run(replace(config, tracker=tracker), Console())
