"""`ridgeline eval`: measure how good a model's predictions are, and what a change to it costs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ridgeline.cli.bench import Device, DType, Extra, Model
from ridgeline.cli.eval_rounding import cache, quantization
from ridgeline.cli.lists import ListCommand
from ridgeline.cli.options import json_object, with_ranks, with_records
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import MAX_LOGPROBS
from ridgeline.core.settings.config import LLMConfig

if TYPE_CHECKING:
    from ridgeline_bench.quality.capacity import Capacity
    from ridgeline_bench.quality.compare import Comparison
    from ridgeline_bench.quality.perplexity import TextScore

app = typer.Typer(
    help="Measure how good predictions are: perplexity, tasks, the cost of a change.", no_args_is_help=True
)
app.command()(quantization)
app.command()(cache)

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Texts; in a .jsonl file the `text` of each line.")
]
Window = Annotated[int | None, typer.Option(help="Tokens read at once (default: 1024, or what the context holds).")]
Stride = Annotated[int | None, typer.Option(help="Tokens the window advances by (default: half the window).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
QUALITY = Path("benchmarks/results/quality.jsonl")
Out = Annotated[Path | None, typer.Option(help="Append the figures to this result file (.jsonl).")]


@dataclasses.dataclass(frozen=True)
class LoadFlags:
    """The way to load a model."""

    dtype: DType = "auto"
    device: Device = "auto"
    extra: Extra = ""

    def arguments(self, model: str, ranks: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `LLM`."""
        return _llm_options(self.extra, model=model, dtype=self.dtype, device=self.device, **ranks)


@dataclasses.dataclass(frozen=True)
class WindowFlags:
    """The windows in which a text is read."""

    window: Window = None
    stride: Stride = None


@dataclasses.dataclass(frozen=True)
class TaskFlags:
    """The tasks' examples."""

    limit: Annotated[float | None, typer.Option(min=0, help="Examples of each task; below 1 a share of them.")] = None
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples shown in the prompt.")] = None
    include_path: Annotated[Path | None, typer.Option(help="Folder of further tasks.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts through the model's chat template.")] = False


@dataclasses.dataclass(frozen=True)
class SideFlags:
    """The two engines that are compared."""

    candidate: Annotated[str, typer.Option(help="JSON object of arguments for our engine: the change to measure.")]
    baseline: Annotated[str, typer.Option(help="JSON object of arguments for the engine it is compared with.")] = "{}"
    model: Model = ""


@app.command()
@with_ranks
@with_records
def perplexity(
    files: Files,
    model: Model = "",
    *,
    windows: WindowFlags,
    load: LoadFlags,
    as_json: Json = False,
    out: Out = None,
    ranks: dict[str, Any],
) -> None:
    """Measure perplexity and bits per byte of texts, each and together, in windows that overlap."""
    options = load.arguments(model, ranks)
    from ridgeline_bench.quality.documents import read_file  # torch takes seconds to import; usage errors need not wait

    texts = [read_file(path) for path in files]
    from ridgeline.llm import LLM
    from ridgeline.progress import TokenBar
    from ridgeline_bench.quality.likelihood import Cut
    from ridgeline_bench.quality.perplexity import Reading, TextScore
    from ridgeline_bench.quality.perplexity import perplexity as measure
    from ridgeline_bench.quality.results import model_name, perplexity_records
    from ridgeline_bench.results import append

    with LLM(**options) as llm:
        cut = Cut.of(llm, windows.window, windows.stride)
        readings = [Reading.of(llm, text, cut) for text in texts]
        with TokenBar("scoring", sum(reading.num_tokens for reading in readings)) as bar:
            scores = [measure(llm, reading, seen=lambda tokens, _: bar(len(tokens))) for reading in readings]
        every = [*scores, TextScore.together(scores)] if len(scores) > 1 else scores
        if out is not None:
            append(out, perplexity_records(llm, every, cut))
        about = {"model": model_name(llm), "dtype": llm.assembly.dtype, "window": cut.window, "stride": cut.stride}
    if as_json:
        print(
            json.dumps(
                {**about, "files": [s.as_dict() for s in scores], "together": TextScore.together(scores).as_dict()}
            )
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
@with_ranks
@with_records
def harness(
    tasks: Annotated[str, typer.Option(help="Tasks of lm-evaluation-harness, separated by commas.")],
    model: Model = "",
    *,
    examples: TaskFlags,
    load: LoadFlags,
    as_json: Json = False,
    out: Out = None,
    ranks: dict[str, Any],
) -> None:
    """Run tasks of lm-evaluation-harness, which comes with the extra `eval`."""
    names = [task.strip() for task in tasks.split(",") if task.strip()]
    options = load.arguments(model, ranks)
    if not names:
        raise InvalidConfig("--tasks names no task.")
    if find_spec("lm_eval") is None:
        raise InvalidConfig("lm-evaluation-harness is not installed; pip install 'ridgeline[eval]' brings it.")
    from lm_eval.utils import make_table

    from ridgeline.llm import LLM
    from ridgeline_bench.quality.harness import run_tasks
    from ridgeline_bench.quality.results import task_records
    from ridgeline_bench.results import append

    with LLM(**options) as llm:
        found = run_tasks(llm, names, **dataclasses.asdict(examples))
        if out is not None:
            append(
                out,
                task_records(llm, found, limit=examples.limit, num_fewshot=examples.num_fewshot, chat=examples.chat),
            )
    print(json.dumps(found["results"]) if as_json else make_table(found))


@app.command()
@with_ranks
@with_records
def compare(
    files: Files,
    *,
    sides: SideFlags,
    windows: WindowFlags,
    device: Device = "auto",
    top: Annotated[int, typer.Option(min=1, max=MAX_LOGPROBS, help="Likeliest tokens compared one by one.")] = 20,
    as_json: Json = False,
    out: Annotated[Path, typer.Option(help="Append the figures to this result file.")] = QUALITY,
    ranks: dict[str, Any],
) -> None:
    """Measure what a change costs: perplexity of both, KL divergence per token (a lower bound), share of equal greedy
    tokens."""
    engines = [
        _llm_options(text, model=sides.model, device=device, **ranks) for text in (sides.baseline, sides.candidate)
    ]
    from ridgeline_bench.quality.documents import read_file

    texts = [read_file(path) for path in files]
    from ridgeline_bench.quality.compare import compare as measure
    from ridgeline_bench.results import append

    found, records = measure(texts, *engines, window=windows.window, stride=windows.stride, top=top)
    append(out, records)
    if as_json:
        print(json.dumps([each.as_dict() for each in found]))
        return
    Console().print(_comparison_table(f"{sides.baseline} against {sides.candidate}, top {top}", found))
    print(f"ridgeline: appended to {out}", file=sys.stderr)


@app.command(cls=ListCommand)
@with_ranks
@with_records
def capacity(
    files: Files,
    model: Model = "",
    factor: Annotated[list[float] | None, typer.Option(help="Capacity factors (default: 1, 1.25, 1.5 and 2).")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Tokens of a batch at most (default: of a step).")] = None,
    window: Annotated[int, typer.Option(min=1, help="Tokens of a piece of text.")] = 1024,
    *,
    load: LoadFlags,
    as_json: Json = False,
    ranks: dict[str, Any],
) -> None:
    """Measure what capacity-limited routing (GShard, Switch) would have dropped of a mixture's tokens. We drop none."""
    options = load.arguments(model, ranks)
    if batch is not None:
        options["max_num_batched_tokens"] = batch
    from ridgeline.llm import LLM
    from ridgeline_bench.quality.capacity import FACTORS, measure_capacity
    from ridgeline_bench.quality.documents import read_file
    from ridgeline_bench.quality.results import model_name

    texts = [read_file(path) for path in files]
    with LLM(**options, enable_prefix_caching=False) as llm:
        found = measure_capacity(llm, texts, factor or FACTORS, window)
        about = {"model": model_name(llm), "dtype": llm.assembly.dtype}
    if as_json:
        print(json.dumps({**about, **found.as_dict()}))
    else:
        Console().print(_capacity_table(about, found))


def _capacity_table(about: dict[str, Any], found: Capacity) -> Table:
    factors = list(found.layers[0].dropped)
    named = ", ".join(f"{name} {value}" for name, value in about.items())
    title = f"{named}: share of pairs dropped at capacity factor, {found.tokens:,} tokens in {found.batches:,} batches"
    table = _columns(title, ("layer", *(f"{factor:g}" for factor in factors), "busiest ÷ mean", "tiles filled"))
    for layer in found.layers:
        shares = (f"{layer.dropped[factor]:.2%}" for factor in factors)
        table.add_row(str(layer.layer), *shares, f"{layer.imbalance:.2f}", f"{layer.filled:.1%}")
    table.add_section()
    table.add_row("together", *(f"{found.mean(factor):.2%}" for factor in factors), "", "")
    return table


def _llm_options(text: str, **defaults: Any) -> dict[str, Any]:
    """Return a JSON object of LLM's arguments, over the defaults. Raise InvalidConfig if it is none."""
    given = json_object(text)
    unknown = sorted(given.keys() - {field.name for field in dataclasses.fields(LLMConfig)})
    if unknown:
        raise InvalidConfig(f"our engine has no argument {', '.join(unknown)}; `ridgeline generate --help` lists them.")
    return {**{name: value for name, value in defaults.items() if value not in ("", "auto")}, **given}


def _comparison_table(title: str, found: list[Comparison]) -> Table:
    columns = ("file", "tokens", "ppl", "ppl then", "KL mean", "KL p99", "greedy", "covered")
    table = _columns(title, columns)
    for each in found:
        d = each.divergence.as_dict()
        table.add_row(
            Path(each.baseline.name).name,
            f"{each.baseline.num_tokens:,}",
            f"{each.baseline.perplexity:,.4f}",
            f"{each.candidate.perplexity:,.4f}",
            f"{d['kl_mean']:.1e}",
            f"{d['kl_p99']:.1e}",
            f"{d['equal_greedy']:.4f}",
            f"{d['covered']:.3f}",
        )
    return table


def _columns(title: str, names: Sequence[str]) -> Table:
    """Return a table of a name and figures that fits a terminal of 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(names):
        figure = number > 0
        table.add_column(name, justify="right" if figure else "left", overflow="fold", no_wrap=figure)
    return table


def _table(about: dict[str, Any], scores: list[TextScore]) -> Table:
    title = ", ".join(f"{name} {value}" for name, value in about.items())
    table = _columns(title, ("file", "perplexity", "nats/token", "bits/byte", "tokens", "bytes", "tokens/s"))
    for s in scores:
        table.add_row(
            Path(s.name).name,
            f"{s.perplexity:,.4f}",
            f"{s.nats_per_token:.5f}",
            f"{s.bits_per_byte:.5f}",
            f"{s.num_tokens:,}",
            f"{s.num_bytes:,}",
            f"{s.tokens_per_second:,.0f}",
        )
    return table
