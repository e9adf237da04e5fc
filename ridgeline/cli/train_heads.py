"""`ridgeline train eagle`, `dflash`, `medusa` and `draft`: what guesses a model's next tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ridgeline.cli.options import with_records
from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.cli.training_options import bytes_of, device_of, imported
from ridgeline.core.errors import InvalidConfig
from ridgeline.weights.folder import resolve_model

Out = Annotated[Path, typer.Option(help="Folder for the finished checkpoint, its log and report.json.")]
Target = Annotated[str, typer.Option(help="The model to draft for (folder, or embedded).")]
Work = Annotated[Path | None, typer.Option(help="Folder for texts and traces; a run takes those that lie there.")]
Minutes = Annotated[float | None, typer.Option(help="Minutes of training, behind the making of texts.", min=0.01)]
Steps = Annotated[int | None, typer.Option(help="Steps, instead of minutes.", min=1)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.", min=0)]
BatchTokens = Annotated[int, typer.Option(help="Tokens of the sequences of a step.", min=1)]
CorpusRows = Annotated[int, typer.Option(help="Sequences of 2048 tokens of this machine's Python source.", min=0)]
OwnRows = Annotated[
    int, typer.Option(help="Sequences of 512 tokens of which the target writes the second half.", min=0)
]
Start = Annotated[str, typer.Option("--from", help="Train this head of the same sizes further (folder).")]
Taps = Annotated[str, typer.Option(help="Layers of the target that are read, from 0, such as 1,3,5.")]
Intermediate = Annotated[int, typer.Option(help="Width of the head's feed-forward.", min=1)]
Seed = Annotated[int, typer.Option(help="Decides text, order and initial weights.")]
TrainMB = Annotated[float | None, typer.Option(help="Draw sequences from about this much text.")]
Requests = Annotated[int, typer.Option(help="Prompts of each held-out set, to count right drafts.", min=1)]
Commit = Annotated[str | None, typer.Option(help="Recorded in the card; default: what git says.")]


@dataclass(frozen=True)
class HeadFlags:
    """The run: what is trained for which target, how long, and where."""

    out: Out
    target: Target = "embedded"
    start: Start = ""
    work: Work = None
    minutes: Minutes = None
    steps: Steps = None
    device: Device = "auto"


@dataclass(frozen=True)
class DraftFlags(HeadFlags):
    start: Annotated[str, typer.Option("--from", help="The smaller model (folder or name).")] = "embedded-draft"


@dataclass(frozen=True)
class TextFlags:
    """The texts that are read, and what is recorded."""

    batch_tokens: BatchTokens = 2048
    corpus_rows: CorpusRows = 96
    own_rows: OwnRows = 384
    seed: Seed = 0
    max_train_mb: TrainMB = 40.0
    requests: Requests = 64
    commit: Commit = None


@with_records
def eagle(
    *,
    run: HeadFlags,
    taps: Taps = "",
    intermediate: Intermediate = 768,
    passes: Annotated[int, typer.Option(help="Tokens behind each position that are learnt.", min=1, max=16)] = 5,
    lr: Rate = 6e-3,
    text: TextFlags,
    track: TrackFlags,
) -> None:
    """Train a head of EAGLE-3, which goes on from the target's hidden states."""
    _run("eagle", run, text, track, lr=lr, passes=passes, taps=taps, intermediate=intermediate)


@with_records
def dflash(
    *,
    run: HeadFlags,
    taps: Taps = "",
    layers: Annotated[int, typer.Option(help="Layers of the head.", min=1)] = 1,
    intermediate: Intermediate = 768,
    block: Annotated[int, typer.Option(help="Places of a block: the last token and its drafts.", min=2, max=17)] = 5,
    lr: Rate = 3e-3,
    text: TextFlags,
    track: TrackFlags,
) -> None:
    """Train a head of DFlash, which guesses a block of tokens at once from the target's hidden states."""
    _run("dflash", run, text, track, lr=lr, passes=block - 1, taps=taps, layers=layers, intermediate=intermediate)


@with_records
def medusa(
    *,
    run: HeadFlags,
    heads: Annotated[int, typer.Option(help="Heads, each of which guesses one token.", min=1, max=16)] = 4,
    joint: Annotated[
        bool, typer.Option("--joint", help="Train the target too (Medusa-2); it is written beside the heads.")
    ] = False,
    lr: Rate = 2e-3,
    text: TextFlags,
    track: TrackFlags,
) -> None:
    """Train heads of Medusa, each of which guesses one token from the target's last hidden state."""
    _run("medusa", run, text, track, lr=lr, passes=heads, heads=heads, joint=joint)


@with_records
def draft(*, run: DraftFlags, lr: Rate = 1e-3, text: TextFlags, track: TrackFlags) -> None:
    """Train a smaller model further, on the target's distributions."""
    _run("draft", run, text, track, lr=lr, passes=1)


def _run(
    kind: str,
    run: HeadFlags,
    text: TextFlags,
    track: TrackFlags,
    *,
    lr: float,
    passes: int,
    taps: str = "",
    **sizes: Any,
) -> None:
    minutes, steps, start = run.minutes, run.steps, run.start
    if (minutes is None) == (steps is None):
        raise InvalidConfig("give either --minutes or --steps.")
    layers, where, most = _layers(taps), device_of(run.device), bytes_of(text.max_train_mb)
    folder, begun = resolve_model(run.target), resolve_model(start) if start else None
    modules = imported("recipe", "head_recipe", "head_loop", "traces")
    seconds = None if minutes is None else 60 * minutes
    config = modules["head_recipe"].HeadConfig(
        kind=kind,
        target=folder,
        start=begun,
        out=run.out,
        work=run.work or run.out / "work",
        device=where,
        training=modules["head_loop"].HeadTraining(
            lr=lr,
            passes=passes,
            steps=steps,
            seconds=seconds,
            scored=0.2 if kind in ("eagle", "dflash") else 1.0,
            alone=0.5 if kind == "eagle" and not start else 0.0,
        ),
        text=modules["traces"].TextConfig(corpus_rows=text.corpus_rows, own_rows=text.own_rows, seed=text.seed),
        taps=layers,
        max_train_bytes=most,
        seed=text.seed,
        command=f"ridgeline train {kind}"
        + (" --joint" if sizes.get("joint") else "")
        + (f" --from {Path(start).name}" if start else "")
        + (f" --steps {steps}" if steps else f" --minutes {minutes:g}")
        + f" --lr {lr:g} --batch-tokens {text.batch_tokens}",
        batch_tokens=text.batch_tokens,
        requests=text.requests,
        commit=text.commit or modules["recipe"].git_commit(),
        **sizes,
    )
    parameters = asdict(run), asdict(text), {"lr": lr, "passes": passes, "taps": taps}, sizes
    with tracked(track, f"train {kind}", *parameters) as tracker:
        modules["head_recipe"].run(replace(config, tracker=tracker), Console())


def _layers(taps: str) -> tuple[int, ...]:
    """Return the numbers of a list such as 1,3,5. Raise InvalidConfig for anything else."""
    try:
        return tuple(int(tap) for tap in taps.split(",")) if taps else ()
    except ValueError as error:
        raise InvalidConfig(f"--taps must name layers such as 1,3,5, got {taps!r}.") from error
