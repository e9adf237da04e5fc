"""`ridgeline eval`: how good a model's predictions are, and what a change to it costs."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli.bench import Device, DType, Extra, Model, _object
from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from ridgeline.evaluation.perplexity import Score

app = typer.Typer(
    help="Measure how good predictions are: perplexity, tasks, the cost of a change.", no_args_is_help=True
)

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Texts; of a .jsonl file each line's `text`.")]
Window = Annotated[int | None, typer.Option(help="Tokens read at once (default: 1024, or what the context holds).")]
Stride = Annotated[int | None, typer.Option(help="Tokens the window advances by (default: half the window).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Out = Annotated[Path | None, typer.Option(help="Append the figures to this result file (.jsonl).")]


@app.command()
def perplexity(
    files: Files,
    model: Model = "",
    window: Window = None,
    stride: Stride = None,
    dtype: DType = "auto",
    device: Device = "auto",
    extra: Extra = "",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Perplexity and bits per byte of texts, each and together, in windows that overlap."""
    options = {"dtype": dtype, "device": device, **_object(extra)}
    from ridgeline.evaluation.documents import read_file  # torch takes seconds to import; usage errors need not wait

    texts = [read_file(path) for path in files]
    from ridgeline.bench.results import append
    from ridgeline.evaluation.perplexity import Reading, Score
    from ridgeline.evaluation.perplexity import perplexity as measure
    from ridgeline.evaluation.results import model_name, perplexity_records
    from ridgeline.evaluation.scoring import Cut
    from ridgeline.llm import LLM
    from ridgeline.progress import TokenBar

    with LLM(model, **options) as llm:
        cut = Cut.of(llm, window, stride)
        readings = [Reading.of(llm, text, cut) for text in texts]
        with TokenBar("scoring", sum(reading.num_tokens for reading in readings)) as bar:
            scores = [measure(llm, reading, bar) for reading in readings]
        every = [*scores, Score.together(scores)] if len(scores) > 1 else scores
        if out is not None:
            append(out, perplexity_records(llm, every, cut))
        about = {"model": model_name(llm), "dtype": llm.assembly.dtype, "window": cut.window, "stride": cut.stride}
    if as_json:
        print(
            json.dumps({**about, "files": [s.as_dict() for s in scores], "together": Score.together(scores).as_dict()})
        )
    else:
        Console().print(_table(about, every))
    for score in scores:
        if not score.exact:
            print(
                f"ridgeline: the tokenizer does not give {score.name} back exactly; "
                "its bits per byte compare with other models' only roughly.",
                file=sys.stderr,
            )


@app.command()
def harness(
    tasks: Annotated[str, typer.Option(help="Tasks of lm-evaluation-harness, separated by commas.")],
    model: Model = "",
    limit: Annotated[float | None, typer.Option(min=0, help="Examples of each task; below 1 a share of them.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples shown in the prompt.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder of further tasks.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts through the model's chat template.")] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    extra: Extra = "",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Tasks of lm-evaluation-harness (needs `pip install ridgeline[eval]`)."""
    names = [task.strip() for task in tasks.split(",") if task.strip()]
    options = {"dtype": dtype, "device": device, **_object(extra)}
    if not names:
        raise InvalidConfig("--tasks names no task.")
    if find_spec("lm_eval") is None:
        raise InvalidConfig("lm-evaluation-harness is not installed; pip install 'ridgeline[eval]' brings it.")
    from lm_eval.utils import make_table

    from ridgeline.bench.results import append
    from ridgeline.evaluation.harness import run_tasks
    from ridgeline.evaluation.results import task_records
    from ridgeline.llm import LLM

    with LLM(model, **options) as llm:
        found = run_tasks(llm, names, limit=limit, num_fewshot=num_fewshot, include_path=include_path, chat=chat)
        if out is not None:
            append(out, task_records(llm, found, limit=limit, num_fewshot=num_fewshot, chat=chat))
    print(json.dumps(found["results"]) if as_json else make_table(found))


def _table(about: dict[str, Any], scores: list[Score]) -> Table:
    table = Table(title=", ".join(f"{name} {value}" for name, value in about.items()), title_justify="left")
    for column in ("file", "perplexity", "nats/token", "bits/byte", "tokens", "bytes", "tokens/s"):
        is_name = column == "file"
        table.add_column(column, justify="left" if is_name else "right", overflow="fold", no_wrap=not is_name)
    for s in scores:
        table.add_row(
            s.name,
            f"{s.perplexity:,.4f}",
            f"{s.nats_per_token:.5f}",
            f"{s.bits_per_byte:.5f}",
            f"{s.num_tokens:,}",
            f"{s.num_bytes:,}",
            f"{s.tokens_per_second:,.0f}",
        )
    return table
