"""The cost of a picture by its size: tokens, keys and values, and the time of tower, prompt and answer.

    python -m ridgeline_bench.scripts.picture_costs benchmarks/models/qwen3-vl-8b benchmarks/models/llava-1.5-7b
        [--sides 256 512 1024 2048] [--text 64] [--answer 128] [--batch 32] [--gpu H200]
        [--draw docs/images/picture-costs.svg] [--measure] [--output FILE.jsonl]

The first table doubles a square picture's side. The second one varies the answer, and says which part of a request's
time is the largest: tower and prompt for short answers, decoding for long ones.
The third one varies the side of a patch at the largest picture, everything else equal.

Times are by arithmetic, at the rates that a device attains: bytes or FLOPs, whichever take longer, op by op. A decode
step is shared by --batch requests. With --measure the model runs here with random weights, one request at a time, and
the first table has the medians of five pictures each: the tower with the way of its pixels to the device, the time to
the first token without it, and a decode step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ridgeline.assembly import assemble
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.layers.encoder.grids import Grid, windows
from ridgeline.media.items import picture as item
from ridgeline.media.layout import Layout, Processor
from ridgeline.media.processors import NAMES, processor_of
from ridgeline.models import model_config
from ridgeline.perf.footprint import kv_bytes_per_token
from ridgeline.perf.hardware import Hardware, find
from ridgeline.perf.roofline import seconds
from ridgeline.perf.tower import tower_ops
from ridgeline.simulation.setup import Settings, Setup
from ridgeline.weights.formats.json_file import read_json
from ridgeline_bench.results import append_lines
from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.svg import Panel
from ridgeline_bench.svg import picture as drawing

ANSWERS = (1, 16, 128, 1024)
PATCHES = (8, 14, 16, 28, 32)
ROUNDS = 5
WORD = 5  # any token


class Seen(NamedTuple):
    """A model with the rules by which it sees pictures."""

    name: str
    folder: Path
    spec: ModelSpec
    tower: TowerSpec
    processor: Processor


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


def grids_of(layout: Layout, processor: Processor) -> list[Grid]:
    """Return the patches of each view."""
    each = processor.patching
    return [Grid(1, view.window.rows // each.rows, view.window.columns // each.columns) for view in layout.views]


def work_of(tower: TowerSpec, grids: Sequence[Grid]) -> list[Any]:
    near = windows(grids, tower.projector.merge, tower.window)[1] if tower.window else ()
    return tower_ops(tower, [grid.patches + tower.class_token for grid in grids], list(near))


def priced(model: Seen, side: int, asked_for: Any, device: Hardware) -> Priced:
    layout = model.processor.layout(side, side)
    ops = work_of(model.tower, grids_of(layout, model.processor))
    tower = sum(seconds(op.cost, device, device.rate("bfloat16")) for op in ops)
    times = Setup(model.spec, device, "bfloat16", Settings(max_num_batched_tokens=16384)).times
    tokens = layout.placeholders + asked_for.text
    middle = tokens + asked_for.answer // 2
    return Priced(
        sum(grid.patches for grid in grids_of(layout, model.processor)),
        layout.placeholders,
        layout.placeholders * kv_bytes_per_token(model.spec, "bfloat16"),
        sum(op.cost.flops for op in ops),
        sum(op.cost.flops for op in ops if op.name == "layers.attention"),
        tower,
        times.seconds(StepShape([tokens], [tokens], 1)),
        times.seconds(StepShape([1] * asked_for.batch, [middle] * asked_for.batch, asked_for.batch)),
    )


def sizes_table(model: Seen, rows: Sequence[tuple[int, Priced]], asked_for: Any) -> None:
    print(f"\n{model.name}: a picture of side x side pixels, {asked_for.text} tokens of text beside it, by arithmetic")
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
        ops = work_of(tower, [Grid(1, cells, cells)])
        attention = sum(op.cost.flops for op in ops if op.name == "layers.attention")
        total = sum(op.cost.flops for op in ops)
        print(f"{p:>3} {cells * cells:>8,} {(total - attention) / 1e12:>12.2f} {attention / 1e12:>13.2f} "
              f"{attention / total:>10.0%}")  # fmt: skip


class Served:
    """A model with random weights on this machine."""

    def __init__(self, model: Seen, text: int) -> None:
        self.model, self.text = model, text
        gpu = torch.cuda.is_available()
        config = LLMConfig(
            model=model.folder, load_format="dummy", device="cuda" if gpu else "cpu",
            dtype="bfloat16" if gpu else "float32", max_model_len=min(16384, model.spec.max_position_embeddings),
            max_num_batched_tokens=8192, max_num_seqs=8, skip_tokenizer_init=True, enable_prefix_caching=False,
        )  # fmt: skip
        self.assembly = assemble(config)
        self.engine = self.assembly.engine
        self.wait: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None

    def request(self, name: str, side: int, seed: int) -> Request:
        """A picture of random pixels behind words of which the first is the request's own."""
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        layout, how = self.model.processor.layout(side, side), self.model.processor.patching
        shown = ShownPictures((Pixels(side, side, pixels.tobytes()),), layout.views, how, layout.order)
        key = item(pixels).digest[:16]
        [grid, *_] = layout.grids or (None,)
        before = (WORD + 1 + seed % 1000, *[WORD] * (self.text // 2))
        tokens = (*before, *[WORD] * layout.placeholders, *[WORD] * (self.text - len(before)))
        at = Inserted(start=len(before), count=layout.placeholders, key=key, name=key.hex(), shown=shown, grid=grid)
        return Request(
            id=name, prompt_token_ids=tokens, params=SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
            seed=0, max_total_tokens=len(tokens) + 9, inserted=(at,),
        )  # fmt: skip

    def run(self, request: Request) -> tuple[float, float]:
        """Return the seconds to the first token, and those of a decode step."""
        self.wait()
        started = time.perf_counter()
        self.engine.add(request)
        while not self._begun():
            pass
        first = time.perf_counter() - started
        while self.engine.has_work:
            self.engine.step()
        return first, (time.perf_counter() - started - first) / 8

    def _begun(self) -> bool:
        """Run a step, and say whether it brought a token. Raise InvalidConfig for a request that ended without."""
        found = list(self.engine.step())
        if failed := [event.error for event in found if event.error]:
            raise InvalidConfig(f"{self.model.name}: a request with a picture failed: {failed[0]}.")
        return any(event.token_id >= 0 for event in found)

    def measured(self, side: int) -> dict[str, Any]:
        """Return the medians for pictures of this size: milliseconds."""
        for seed in (1, 2):
            self.run(self.request(f"warm {side} {seed}", side, seed))
        requests = [self.request(f"{side} {n}", side, 10 + n) for n in range(ROUNDS)]
        fresh = [self.run(each) for each in requests]
        again = [self.run(replace(each, id=f"{each.id} again")) for each in requests]
        first, second = (statistics.median(each[0] for each in runs) for runs in (fresh, again))
        step = statistics.median(each[1] for each in fresh + again)
        return {"side": side, "ttft_ms": 1e3 * first, "tower_ms": 1e3 * (first - second), "prompt_ms": 1e3 * second,
                "step_ms": 1e3 * step}  # fmt: skip


def measure(model: Seen, rows: Sequence[tuple[int, Priced]], given: Any) -> list[dict[str, Any]]:
    served = Served(model, given.text)
    lines = []
    print(f"\n{model.name}: measured, one request at a time; beside it the arithmetic of the tower and of the prompt")
    print(f"{'side':>5} {'TTFT ms':>8} {'tower ms':>9} {'least':>7} {'prompt ms':>10} {'least':>7} {'step ms':>8}")
    try:
        for side, row in rows:
            line = served.measured(side)
            print(
                f"{side:>5} {line['ttft_ms']:>8.2f} {line['tower_ms']:>9.2f} {1e3 * row.tower:>7.2f} "
                f"{line['prompt_ms']:>10.2f} {1e3 * row.prompt:>7.2f} {line['step_ms']:>8.2f}", flush=True,
            )  # fmt: skip
            least = {"least_tower_ms": 1e3 * row.tower, "least_prompt_ms": 1e3 * row.prompt, "tokens": row.vectors}
            lines.append({"workload": "picture costs", "model": model.name, **line, **least, "text": given.text})
    finally:
        served.engine.shutdown()
    return lines


def draw(models: Sequence[tuple[Seen, Sequence[tuple[int, Priced]]]], path: Path, device: str) -> None:
    def curves(value: Callable[[Priced], float]) -> dict[str, list[tuple[float, float]]]:
        return {model.name: [(float(side), value(row)) for side, row in rows] for model, rows in models}

    panels = [
        Panel("tokens of a picture", "side, pixels", curves(lambda row: float(row.vectors)), log_y=True),
        Panel("keys and values, MiB", "side, pixels", curves(lambda row: row.cached / 2**20), log_y=True),
        Panel("tower and prompt, ms", "side, pixels", curves(lambda row: 1e3 * (row.tower + row.prompt)), log_y=True),
    ]
    path.write_text(drawing(panels, f"a picture by its size, {device} by arithmetic"))


def main() -> None:
    given = asked(
        __doc__, "models...", sides=[256, 512, 1024, 2048], text=64, answer=128, batch=32, gpu="H200", draw=Path,
        measure=False, output=Path,
    )  # fmt: skip
    with told():
        device, all_rows, lines = find(given.gpu).attained(), [], []
        for folder in given.models:
            model = read(Path(folder))
            rows = [(side, priced(model, side, given, device)) for side in given.sides]
            all_rows.append((model, rows))
            sizes_table(model, rows, given)
            shares_table(model, rows, given.batch)
            patches_table(model, given.sides[-1])
            if given.measure:
                lines += measure(model, rows, given)
        if given.draw is not None:
            draw(all_rows, given.draw, device.name)
        if given.output is not None:
            append_lines(given.output, lines)


if __name__ == "__main__":
    main()
