"""The pictures of the pages, each made again from stored results or from arithmetic.

A picture of matplotlib is the same bit for bit only with the version that drew it, which its text names.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline_bench.scripts.evidence.commands import ROOT
from ridgeline_bench.scripts.evidence.stored import FOLDER, lines_of
from ridgeline_bench.svg import Panel, picture

IMAGES = ROOT / "docs" / "images"
CONFIGS = ROOT / "tests" / "perf" / "configs"
CROSSOVER = ("llama-8b", "qwen3.5-9b", "falcon-mamba-7b")
QUANTIZED_AT, SERVED_AT = "865b5cdfe209", "f2e16f9"  # commits of the runs that are shown
ENDINGS = (".svg", ".png", ".pdf")
BY_MATPLOTLIB = re.compile(r"Matplotlib v([\d.]+)")


def _lines(name: str) -> list[dict[str, Any]]:
    return [dict(line) for line in lines_of(FOLDER / name)]


def _written(by: Callable[[Path], object]) -> str:
    """Return the text of a picture that a function writes to a file, with matplotlib as it is when it starts."""
    import matplotlib as mpl  # the extra `train`

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), mpl.rc_context():
        mpl.rcdefaults()
        by(Path(folder) / "picture.svg")
        return (Path(folder) / "picture.svg").read_text(encoding="utf-8")


def allocator() -> str:
    from ridgeline_bench.scripts.allocator import page

    lines = _lines("h200-allocator.jsonl")
    return _written(lambda path: page.draw(lines, path))


def batch_sweep() -> str:
    from ridgeline_bench.scripts import batch_sweep, experiments_page

    swept = [line for line in _lines("experiments.jsonl") if line["workload"] == "batch sweep"]
    newest = [dict(line) for line in experiments_page.newest(swept, "batch")]
    return _written(lambda path: batch_sweep.draw(newest, path))


def code_tasks() -> str:
    from ridgeline_bench.scripts.code_tasks import measure

    names = {"": "", "tuned/adapter": "behind examples", "rewarded/adapter": "behind rewards"}
    rows = [row | {"adapter": names[row["adapter"]]} for row in _lines("code-tasks.jsonl")[-1]["rows"]]
    return _written(lambda path: measure.draw(rows, path, "embedded"))


def crossover() -> str:
    from ridgeline.cli import app

    models = [str(CONFIGS / f"{name}.json") for name in CROSSOVER]
    return _written(
        lambda path: app(["crossover", *models, "--gpu", "H200", "--plot", str(path)], standalone_mode=False)
    )


def float8() -> str:
    from ridgeline_bench.scripts import float8

    return _written(float8.draw)


def frame_attention() -> str:
    from ridgeline_bench.scripts import frame_attention

    lines = [line for line in _lines("h200-frames.jsonl") if line["workload"] == "frame attention"]
    return _written(lambda path: frame_attention.draw(lines, path))


def speech_stream() -> str:
    from ridgeline_bench.scripts import speech_stream

    return _written(lambda path: speech_stream.drawn(_lines("cpu-speech-stream.jsonl"), path))


def ladder(name: str) -> str:
    from ridgeline_bench.ladders import page

    times = page.newest(name)
    return _written(lambda path: page.draw(times, f"The {name} ladder on one H200; libraries are grey", path))


def long_context() -> str:
    from ridgeline_bench.scripts import long_context

    return long_context.drawing(_lines("long-context.jsonl"))


def mixer_quality() -> str:
    from ridgeline_bench.scripts import mixer_quality

    return mixer_quality.drawing(_lines("mixer-quality.jsonl"))


def mixture() -> str:
    """Return the loss and the busiest expert's load of three small mixtures while they are trained."""
    from ridgeline_bench.scripts.experiments_page import grouped

    runs = grouped((line for line in _lines("mixture-training.jsonl") if "step" in line), "model")

    def curves(field: str) -> Mapping[str, Sequence[tuple[float, float]]]:
        return {run[0]["model"]: [(line["tokens"], line[field]) for line in run] for run in runs}

    panels = [
        Panel("training loss, nats a token", "tokens", curves("loss")),
        Panel("load of the busiest expert over the mean", "tokens", curves("max_over_mean"), log_y=True),
    ]
    return picture(panels, "Three mixtures of 16 experts")


def clip_tokens() -> str:
    from ridgeline_bench.scripts.small_vision import clip_tokens

    lines = [line for line in _lines("h200-frames.jsonl") if line["workload"] == "clip tokens"]
    return _written(lambda path: clip_tokens.drawn_forms(lines, path))


def pictures_in_models() -> str:
    from ridgeline_bench.scripts import pictures_in_models

    return _written(pictures_in_models.drawn)


def picture_costs() -> str:
    from ridgeline_bench.scripts import picture_costs

    folders = [ROOT / "benchmarks" / "models" / name for name in ("qwen3-vl-8b", "qwen2.5-vl-7b", "llava-1.5-7b")]
    return _written(lambda path: picture_costs.drawn(folders, path))


def picture_tokens() -> str:
    from ridgeline_bench.scripts.small_vision import picture_tokens

    return _written(lambda path: picture_tokens.drawn_forms(_lines("h200-picture-tokens.jsonl"), path))


def videos() -> str:
    from ridgeline_bench.scripts import videos

    return _written(lambda path: videos.drawn_lengths(_lines("h200-videos.jsonl"), path))


def picture_work() -> str:
    from ridgeline_bench.scripts import picture_costs

    return _written(lambda path: picture_costs.drawn_work(ROOT / "benchmarks" / "models" / "qwen3-vl-8b", path))


def preemption() -> str:
    from ridgeline_bench.scripts import preemption

    return _written(lambda path: preemption.draw(_lines("preemption.jsonl"), path))


def quantization() -> str:
    from ridgeline_bench.quality.rounding_results import draw, rows_of
    from ridgeline_bench.results import read

    records = [r for r in read([FOLDER / "quantization.jsonl"]) if r.machine.commit == QUANTIZED_AT]
    rows = rows_of([record for record in records if record.workload.startswith("quantization:")])
    return _written(lambda path: draw(rows, f"{records[0].model} on {records[0].machine.cpu}", path))


def scaling_laws() -> str:
    from ridgeline_bench.scripts import scaling_laws

    return scaling_laws.drawing(_lines("scaling-laws.jsonl"), scaling_laws.HELD_OUT)


def sequence_lengths() -> str:
    from ridgeline_bench.results import read
    from ridgeline_bench.scripts import sequence_lengths

    return sequence_lengths.drawing(read([FOLDER / "h100-sequence-lengths.jsonl"]))


def serving() -> str:
    from ridgeline_bench.results import read
    from ridgeline_bench.serving.plot import draw
    from ridgeline_bench.serving.show import points_of

    records = [r for r in read([FOLDER / "serving-h200.jsonl"]) if r.machine.commit == SERVED_AT]
    servers = {name: [r for r in records if r.engine == name] for name in dict.fromkeys(r.engine for r in records)}
    named = {f"{found[0].engine} {found[0].version}": found for found in servers.values()}
    curves = {found[0].engine: points_of(found) for found in servers.values()}
    return _written(lambda path: draw(curves, f"{records[0].model}: {' and '.join(named)}", path))


def memory_bound() -> str:
    from ridgeline_bench.ladders import bytes_page
    from ridgeline_bench.ladders.page import newest

    return _written(lambda path: bytes_page.draw(newest(bytes_page.LADDER), path))


def q_former() -> str:
    from ridgeline_bench.scripts.senses import beside

    return beside.drawing(_lines("h200-q-former.jsonl"))


def training_precision() -> str:
    from ridgeline_bench.scripts import training_precision

    return training_precision.drawing(_lines("training-precision.jsonl"))


def simulation() -> str:
    """Draw the measured curve beside a simulation of the same requests."""
    from ridgeline.models import model_config
    from ridgeline.perf.hardware import find
    from ridgeline.simulation.fleet import Fleet, FleetSettings
    from ridgeline.simulation.setup import Settings, Setup
    from ridgeline.simulation.traffic import Listed
    from ridgeline.weights.formats.json_file import read_json
    from ridgeline_bench.results import read
    from ridgeline_bench.serving.asks import asks
    from ridgeline_bench.serving.plot import draw
    from ridgeline_bench.serving.show import points_of
    from ridgeline_bench.serving.simulated import point
    from ridgeline_bench.serving.work import Lengths, Work

    records = [r for r in read([FOLDER / "serving-h200.jsonl"]) if r.machine.commit == SERVED_AT]
    measured = points_of([r for r in records if r.engine == "ridgeline"])
    config = ROOT / "benchmarks" / "models" / "llama-8b" / "config.json"
    spec = model_config(read_json(config, required=True)).spec
    setup = Setup(spec, find("H200").attained(), "bfloat16", Settings(max_model_len=8192, utilization=0.85))
    sizes = {"input_len": Lengths.parse("128:1024", "input"), "output_len": Lengths.parse("64:256", "output")}
    work = Work(duration=14.0, **sizes)
    runs = ((p.rate, Fleet(setup, FleetSettings(), Listed(asks(work, p.rate))).run()) for p in measured)
    curves = {"measured": measured, "simulated": [point(*run) for run in runs]}
    return _written(lambda path: draw(curves, "Llama-3.1-8B on one H200", path))


def vllm(theme: str) -> str:
    from ridgeline_bench.scripts import readme_chart

    runs = readme_chart.runs(_lines("h200.jsonl"))
    return _written(lambda path: readme_chart.draw(runs, theme, path))


PICTURES: Mapping[str, Callable[[], str]] = {
    "docs/images/allocator.svg": allocator,
    "docs/images/attention-ladder.svg": lambda: ladder("attention"),
    "docs/images/batch-sweep.svg": batch_sweep,
    "docs/images/clip-tokens.svg": clip_tokens,
    "docs/images/code-tasks.svg": code_tasks,
    "docs/images/crossover.svg": crossover,
    "docs/images/float8.svg": float8,
    "docs/images/frame-attention.svg": frame_attention,
    "docs/images/gemm-ladder.svg": lambda: ladder("gemm"),
    "docs/images/long-context.svg": long_context,
    "docs/images/memory-bound.svg": memory_bound,
    "docs/images/mixer-quality.svg": mixer_quality,
    "docs/images/mixture.svg": mixture,
    "docs/images/picture-costs.svg": picture_costs,
    "docs/images/picture-tokens.svg": picture_tokens,
    "docs/images/picture-work.svg": picture_work,
    "docs/images/pictures-in-models.svg": pictures_in_models,
    "docs/images/preemption.svg": preemption,
    "docs/images/q-former.svg": q_former,
    "docs/images/quantization.svg": quantization,
    "docs/images/scaling-laws.svg": scaling_laws,
    "docs/images/sequence-lengths.svg": sequence_lengths,
    "docs/images/simulation.svg": simulation,
    "docs/images/speech-stream.svg": speech_stream,
    "docs/images/training-precision.svg": training_precision,
    "docs/images/videos.svg": videos,
    "docs/images/vllm-dark.svg": lambda: vllm("dark"),
    "docs/images/vllm-light.svg": lambda: vllm("light"),
    "benchmarks/results/serving-h200.svg": serving,
}


def checked_in() -> list[str]:
    """Return the pictures that the tree has beside its pages and results."""
    found = [path for folder in (ROOT / "docs", FOLDER) for path in folder.rglob("*") if path.suffix in ENDINGS]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def problem(name: str) -> str | None:
    """Return the fault of a picture, or None: nothing draws it, it is not there, or its data draw another. Where no
    data are stored yet, none needs be there."""
    if name not in PICTURES:
        return f"nothing draws {name}; pictures.py must say what does"
    made = _made(name)
    if not (ROOT / name).is_file():
        return made and f"{name} is not there; python -m ridgeline_bench.scripts.evidence --draw makes it"
    if made is None:
        return f"the data of {name} are not stored"
    there = (ROOT / name).read_text(encoding="utf-8")
    if there == made or BY_MATPLOTLIB.findall(there) != BY_MATPLOTLIB.findall(made):
        return None
    return f"the data of {name} draw another picture; python -m ridgeline_bench.scripts.evidence --draw makes it anew"


def _made(name: str) -> str | None:
    """Return a picture as its data draw it, None if these are not stored."""
    try:
        return PICTURES[name]()
    except FileNotFoundError:
        return None


def problems() -> Iterator[str]:
    yield from filter(None, map(problem, sorted({*PICTURES, *checked_in()})))


def draw_all() -> None:
    for name in PICTURES:
        if made := _made(name):
            (ROOT / name).write_text(made, encoding="utf-8")
