"""The cost of a picture by its size: tokens, keys and values, and the time of tower, prompt and answer.

    python -m ridgeline_bench.scripts.picture_costs benchmarks/models/qwen3-vl-8b benchmarks/models/llava-1.5-7b
        [--sides 256 512 1024 2048] [--frames 16 64 256] [--text 64] [--answer 128] [--batch 32] [--gpu H200]
        [--draw docs/images/picture-costs.svg]

The first table doubles a square picture's side. The second one varies the answer, and says which part of a request's
time is the largest: tower and prompt for short answers, decoding for long ones.
The third one varies the side of a patch at the largest picture, everything else equal.
The fourth one has videos of --frames chosen frames, two a second, of a model that sees such: its processor makes frames
smaller where there are many. TTFT is that of an idle server: the tower, and the prompt in steps of 16,384 tokens.

Times are by arithmetic, at the rates that a device attains: bytes or FLOPs, whichever take longer, op by op. A decode
step is shared by --batch requests. `ridgeline_bench.scripts.pictures` measures the same models on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.base.cost import OpCost, StepShape
from ridgeline.media.layout import Layout, Processor, VideoProcessor
from ridgeline.media.processors import NAMES, processor_of
from ridgeline.models import model_config
from ridgeline.perf.footprint import kv_bytes_per_token
from ridgeline.perf.hardware import Hardware, find
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import seconds
from ridgeline.perf.towers import tower_ops
from ridgeline.simulation.setup import Settings, Setup
from ridgeline.weights.formats.json_file import read_json
from ridgeline_bench.scripts.asked import asked, check_counts, told
from ridgeline_bench.svg import Panel
from ridgeline_bench.svg import picture as drawing

ANSWERS = (1, 16, 128, 1024)
PATCHES = (8, 14, 16, 28, 32)
WORD = 5  # any token
STEP = 16_384  # tokens of a step


class Seen(NamedTuple):
    """A model with the rules by which it sees pictures."""

    name: str
    folder: Path
    spec: ModelSpec
    tower: TowerSpec
    processor: Processor


class Beside(NamedTuple):
    """Tokens of text beside the picture, tokens of the answer, and requests that decode together."""

    text: int = 64
    answer: int = 128
    batch: int = 32


class Priced(NamedTuple):
    """The work of a request with one picture. tower, prompt, step: seconds; step: of a decode step of all requests."""

    patches: int
    vectors: int
    cached: float  # bytes of keys and values of the picture
    tower_flops: float
    attention_flops: float
    tower: float
    prompt: float
    step: float


def read(folder: Path) -> Seen:
    """Return the model of a folder that has the JSON files alone. Raise InvalidConfig if it sees no pictures."""
    spec = model_config(read_json(folder / "config.json", required=True)).spec
    if spec.tower is None:
        raise InvalidConfig(f"{folder} sees no pictures; give a model with a tower.")
    files = {name: read_json(folder / name) for name in NAMES if (folder / name).exists()}
    return Seen(folder.name, folder, spec, spec.tower, processor_of(files, lambda text: [WORD] * bool(text)))


def views_of(layout: Layout, processor: Processor) -> list[int]:
    """Return the patches of each view."""
    each = processor.patching
    return [view.window.rows // each.rows * (view.window.columns // each.columns) for view in layout.views]


def work_of(tower: TowerSpec, views: Sequence[int]) -> list[OpCost]:
    return list(tower_ops(tower, views, precision("bfloat16")))


def flops_of(ops: Sequence[OpCost]) -> tuple[float, float]:
    """Return the operations of all ops, and those of attention's products of queries, keys and values."""
    total = sum(op.count * op.cost.flops for op in ops)
    return total, sum(op.count * op.cost.flops for op in ops if op.name == "tower.packed_attention")


def priced(model: Seen, side: int, beside: Beside, device: Hardware) -> Priced:
    layout = model.processor.layout(side, side)
    views = views_of(layout, model.processor)
    ops = work_of(model.tower, views)
    tower = sum(op.count * seconds(op.cost, device, device.rate("bfloat16")) for op in ops)
    times = Setup(model.spec, device, "bfloat16", Settings(max_num_batched_tokens=STEP)).times
    tokens = layout.placeholders + beside.text
    middle = tokens + beside.answer // 2
    return Priced(
        sum(views),
        layout.placeholders,
        layout.placeholders * kv_bytes_per_token(model.spec, "bfloat16"),
        *flops_of(ops),
        tower,
        times.seconds(StepShape([tokens], [tokens], 1)),
        times.seconds(StepShape([1] * beside.batch, [middle] * beside.batch, beside.batch)),
    )


def sizes_table(model: Seen, rows: Sequence[tuple[int, Priced]], beside: Beside) -> None:
    print(f"\n{model.name}: a picture of side x side pixels, {beside.text} tokens of text beside it, by arithmetic")
    print(f"{'side':>5} {'patches':>8} {'tokens':>7} {'KV MiB':>7} {'tower TF':>9} {'attention':>9} {'tower ms':>9} "
          f"{'prompt ms':>9} {'step ms':>8}")  # fmt: skip
    for side, row in rows:
        flops, share = row.tower_flops / 1e12, row.attention_flops / row.tower_flops
        print(f"{side:>5} {row.patches:>8,} {row.vectors:>7,} {row.cached / 2**20:>7.1f} {flops:>9.2f} {share:>9.0%} "
              f"{1e3 * row.tower:>9.2f} {1e3 * row.prompt:>9.2f} {1e3 * row.step:>8.2f}")  # fmt: skip


def shares_table(model: Seen, rows: Sequence[tuple[int, Priced]], batch: int) -> None:
    print(f"\n{model.name}: share of the device's time for one request of {batch} that run together")
    print(f"{'side':>5} {'answer':>7} {'tower':>6} {'prompt':>7} {'decode':>7}")
    for side, row in rows:
        for answer in ANSWERS:
            parts = (row.tower, row.prompt, answer * row.step / batch)
            total = sum(parts)
            print(f"{side:>5} {answer:>7} {parts[0] / total:>6.0%} {parts[1] / total:>7.0%} {parts[2] / total:>7.0%}")


def patches_table(model: Seen, side: int) -> None:
    print(f"\n{model.name}: the tower's FLOPs for {side} x {side} pixels by the side of a patch: n = (side / p)²")
    print(f"{'p':>3} {'patches':>8} {'products TF':>12} {'attention TF':>13} {'attention':>10}")
    frames, merge = model.processor.patching.frames, model.tower.projector.merge
    for p in (each for each in PATCHES if each * merge <= side):
        cells = side // p // merge * merge
        tower = replace(model.tower, patch_width=3 * frames * p * p)
        total, attention = flops_of(work_of(tower, [cells * cells]))
        print(f"{p:>3} {cells * cells:>8,} {(total - attention) / 1e12:>12.2f} {attention / 1e12:>13.2f} "
              f"{attention / total:>10.0%}")  # fmt: skip


class Filmed(NamedTuple):
    """The work of a request with one video. tower, prompt, step: seconds; step: of a decode step of all requests."""

    seen: tuple[int, int]  # height and width that the tower sees
    tokens: int
    cached: float  # bytes of keys and values of the prompt
    tower: float
    prompt: float
    step: float


def filmed(model: Seen, frames: int, side: int, beside: Beside, device: Hardware) -> Filmed:
    """Return the work of a request with a video of so many chosen frames, two a second. Raise InvalidConfig for a model
    that sees none."""
    if not isinstance(model.processor, VideoProcessor):
        raise InvalidConfig(f"{model.name} sees no videos; leave --frames out.")
    layout = model.processor.video([each / 2 for each in range(frames)], side, side, 2.0)
    ops = work_of(model.tower, views_of(layout, model.processor))
    times = Setup(model.spec, device, "bfloat16", Settings(max_num_batched_tokens=STEP)).times
    tokens, prompt = len(layout.token_ids) + beside.text, 0.0
    for start in range(0, tokens, STEP):
        end = min(start + STEP, tokens)
        prompt += times.seconds(StepShape([end - start], [end], 1))
    middle = tokens + beside.answer // 2
    return Filmed(
        layout.views[0].size,
        tokens,
        tokens * kv_bytes_per_token(model.spec, "bfloat16"),
        sum(op.count * seconds(op.cost, device, device.rate("bfloat16")) for op in ops),
        prompt,
        times.seconds(StepShape([1] * beside.batch, [middle] * beside.batch, beside.batch)),
    )


def videos_table(model: Seen, frames: Sequence[int], sides: Sequence[int], beside: Beside, device: Hardware) -> None:
    print(f"\n{model.name}: a video of chosen frames, {beside.text} tokens of text beside it, by arithmetic")
    print(f"{'frames':>6} {'side':>5} {'seen':>10} {'tokens':>8} {'KV MiB':>7} {'tower ms':>9} {'prompt ms':>10} "
          f"{'TTFT ms':>8} {'step ms':>8}")  # fmt: skip
    for count in frames:
        for side in sides:
            row = filmed(model, count, side, beside, device)
            seen, ms = f"{row.seen[0]} x {row.seen[1]}", [1e3 * each for each in (row.tower, row.prompt, row.step)]
            print(f"{count:>6} {side:>5} {seen:>10} {row.tokens:>8,} {row.cached / 2**20:>7,.0f} {ms[0]:>9.1f} "
                  f"{ms[1]:>10.1f} {ms[0] + ms[1]:>8.1f} {ms[2]:>8.2f}")  # fmt: skip


def draw(models: Sequence[tuple[Seen, Sequence[tuple[int, Priced]]]], path: Path, device: str) -> None:
    """Draw the first table's tokens, bytes and times."""

    def curves(value: Callable[[Priced], float]) -> dict[str, list[tuple[float, float]]]:
        return {model.name: [(float(side), value(row)) for side, row in rows] for model, rows in models}

    panels = [
        Panel("tokens of a picture", "side, pixels", curves(lambda row: float(row.vectors)), log_y=True),
        Panel("keys and values, MiB", "side, pixels", curves(lambda row: row.cached / 2**20), log_y=True),
        Panel("tower and prompt, ms", "side, pixels", curves(lambda row: 1e3 * (row.tower + row.prompt)), log_y=True),
    ]
    path.write_text(drawing(panels, f"a picture by its size, {device} by arithmetic"))


SIDES = (256, 512, 1024, 2048)
Rows = list[tuple[int, Priced]]


def drawn(folders: Sequence[Path], path: Path) -> None:
    """Draw models as the command does by default."""
    device, models = find("H200").attained(), [read(folder) for folder in folders]
    draw([(model, rows_of(model, SIDES, Beside(), device)) for model in models], path, device.name)


def drawn_work(folder: Path, path: Path, side: int = 1024, largest: int = 2048) -> None:
    """Draw the second and third table: parts of a request over its answer, and the tower over the side of a patch."""
    device, model, beside = find("H200").attained(), read(folder), Beside()
    row, frames, merge = priced(model, side, beside, device), model.processor.patching.frames, model.tower.merge
    parts: dict[str, list[tuple[float, float]]] = {"tower": [], "prompt": [], "decoding": []}
    for answer in ANSWERS:
        seconds_of = (row.tower, row.prompt, answer * row.step / beside.batch)
        for name, each in zip(parts, seconds_of, strict=True):
            parts[name].append((float(answer), each / sum(seconds_of)))
    flops: dict[str, list[tuple[float, float]]] = {"products": [], "attention": []}
    for p in PATCHES:
        cells = largest // p // merge * merge
        total, attention = flops_of(work_of(replace(model.tower, patch_width=3 * frames * p * p), [cells * cells]))
        flops["products"].append((float(p), (total - attention) / 1e12))
        flops["attention"].append((float(p), attention / 1e12))
    panels = [
        Panel(f"share of a request's time, {side} x {side}", "tokens of the answer", parts),
        Panel(f"the tower's TFLOP, {largest} x {largest}", "side of a patch, pixels", flops, log_y=True),
    ]
    path.write_text(drawing(panels, f"{model.name}, {device.name} by arithmetic"))


def rows_of(model: Seen, sides: Sequence[int], beside: Beside, device: Hardware) -> Rows:
    return [(side, priced(model, side, beside, device)) for side in sides]


def main() -> None:
    given = asked(__doc__, "models...", sides=list(SIDES), frames=[int], **Beside()._asdict(), gpu="H200", draw=Path)
    beside = Beside(given.text, given.answer, given.batch)
    with told():
        check_counts(given, "sides", "text", "answer", "batch")
        device, every = find(given.gpu).attained(), list[tuple[Seen, Rows]]()
        for folder in given.models:
            model = read(Path(folder))
            rows = rows_of(model, given.sides, beside, device)
            every.append((model, rows))
            sizes_table(model, rows, beside)
            shares_table(model, rows, beside.batch)
            patches_table(model, given.sides[-1])
            if given.frames:
                videos_table(model, given.frames, given.sides, beside, device)
        if given.draw is not None:
            draw(every, given.draw, device.name)


if __name__ == "__main__":
    main()
