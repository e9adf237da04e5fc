"""Prompts with pictures through one engine on random weights: TTFT, the tower's time, and requests per second.

    python -m ridgeline_bench.scripts.pictures --model FOLDER [--sides 512 1024] [--requests 32] [--tokens 16]
        [--pictures 8] [--rounds 3] [--beside 0] [--options JSON] [--output FILE.jsonl]

FOLDER has a config.json of a vision-language model, such as benchmarks/models/qwen3-vl-8b. A prompt is a square picture
of random pixels, which the tower sees as it is, between six words. No two pictures of a run are alike unless it says
so.

    TTFT       ms from the request to its first token, with nothing beside it: the median of --pictures
    again      the same with a picture that was there before
    tower      ms from the first launch for one picture's patches and vectors to the end of the last
    kernels    ms of these in which kernels run, without the time in which the GPU waits for the host
    requests/s --requests that come at once, with --tokens tokens of output each: the most of --rounds
    limit      the requests/s of the hardware: the tower's and the prompt's operations, and the steps that decode
    ITL        ms between the tokens of --beside requests of words, by themselves and beside prompts with a picture, of
               which one comes as soon as the last one has ended; with the option itl_target steps are bounded

A model whose positions are a fixed grid (LLaVA-1.5) takes pictures of that size alone, so --sides is ignored.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import ridgeline
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.pictures.views import Box, Patching, View
from ridgeline.media.items import picture
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import step_limit, step_ops
from ridgeline.perf.towers import tower_ops
from ridgeline.worker.machine import hardware_of
from ridgeline_bench.scripts.asked import asked, keep, told

WORDS = 6
REST = 15.0  # seconds in which an engine captures what is left, before gaps between tokens are measured


def patching_of(tower: TowerSpec) -> Patching:
    """Return a way to make patches that fits the tower: squares of pixels, once or twice for two frames."""
    frames = next(count for count in (1, 2) if (tower.patch_width / (3 * count)) ** 0.5 % 1 == 0)
    side = int((tower.patch_width / (3 * frames)) ** 0.5)
    half = (0.5, 0.5, 0.5)
    return Patching("bicubic", 1 / 255, half, half, side, side, frames=frames, merge=tower.projector.merge)


class PictureBench:
    """An engine that sees pictures."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = ridgeline.LLM(model, **{"skip_tokenizer_init": True, "load_format": "dummy", **options})
        self.engine = cast("Any", self.llm.assembly.engine)
        self.spec = self.llm.assembly.model.spec
        assert self.spec.tower is not None
        self.tower, self._made = self.spec.tower, 0
        self.patching = patching_of(self.tower)
        self.dtype = self.engine._worker._runner.decoder.dtype
        self.axes = any(getattr(getattr(layer.mixer, "rope", None), "axes", ()) for layer in self.spec.layers)

    def shown(self, side: int, seed: int) -> tuple[ShownPictures, bytes]:
        """Return a picture of random pixels, with its key."""
        pixels_HWC = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        pixels = Pixels(side, side, pixels_HWC.tobytes())
        return ShownPictures((pixels,), (View(side, side, Box(0, 0, side, side)),), self.patching), picture(
            pixels_HWC
        ).digest[:16]

    def request(self, side: int, seed: int, tokens: int) -> Request:
        shown, key = self.shown(side, seed)
        [(rows, columns)], merge = shown.grids, self.patching.merge
        grid = (1, rows // merge, columns // merge) if self.axes else None
        at = Inserted(start=3, count=shown.vectors, key=key, name=key.hex(), shown=shown, grid=grid)
        self._made += 1
        words = [self._made % 90 + 5 + n for n in range(WORDS)]
        prompt = (*words[:3], *([8] * shown.vectors), *words[3:])
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return Request(
            id=str(self._made), prompt_token_ids=prompt, params=params, seed=0,
            max_total_tokens=len(prompt) + tokens, inserted=(at,),
        )  # fmt: skip

    def first(self, request: Request) -> float:
        """Return the seconds to the first token of a request that runs alone, to its end."""
        begun = time.perf_counter()
        self.engine.add(request)
        took = 0.0
        while self.engine.has_work:
            if any(event.token_id >= 0 for event in self.engine.step()) and not took:
                took = time.perf_counter() - begun
        return took

    def all(self, requests: list[Request]) -> float:
        """Return the seconds until requests that come at once have ended. Raise RuntimeError if one fails."""
        begun = time.perf_counter()
        for each in requests:
            self.engine.add(each)
        while self.engine.has_work:
            for event in self.engine.step():
                if event.error:
                    raise RuntimeError(event.error)
        return time.perf_counter() - begun

    def rest(self, seconds: float) -> None:
        """Let the engine do what it does without requests, such as captures of graphs, for at most so long."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until and self.engine.rest():
            pass

    def gaps(self, rows: int, side: int, steps: int = 96) -> tuple[list[float], list[float], int]:
        """Return the seconds between tokens of requests of words (by themselves, beside prompts with pictures), and how
        many of those prompts ended."""
        words = [self._words(64, 2 * steps + 16) for _ in range(rows)]
        begun = dict[str, float]()
        found: tuple[list[float], list[float]] = [], []
        shown, ended, names = "", -1, {each.id for each in words}
        for each in words:
            self.engine.add(each)
        while self.engine.has_work:
            beside = min(map(len, found[:1])) >= steps * rows
            if beside and not shown and len(found[1]) < steps * rows:
                ended += 1
                self.engine.add(asked := self.request(side, 5000 + self._made, 2))
                shown = asked.id
            for event in self.engine.step():
                now = time.perf_counter()
                if event.request_id in names and event.token_id >= 0:
                    if event.request_id in begun and len(begun) == rows:
                        found[beside].append(now - begun[event.request_id])
                    begun[event.request_id] = now
                elif event.request_id == shown and event.finish_reason:
                    shown = ""
        return *found, ended

    def _words(self, count: int, tokens: int) -> Request:
        self._made += 1
        prompt = tuple(self._made % 90 + 5 + n for n in range(count))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return Request(
            id=str(self._made), prompt_token_ids=prompt, params=params, seed=0, max_total_tokens=count + tokens
        )

    @torch.inference_mode()
    def kernels_ms(self, side: int) -> float:
        """Return the milliseconds in which a GPU runs kernels for patches and vectors of a picture; 0 without a GPU."""
        if not torch.cuda.is_available():
            return 0.0
        part = self.engine._worker._runner.inserted._pictures
        shown, _ = self.shown(side, 0)
        total = 0.0
        with suppress(RuntimeError):  # without CUPTI nothing is known
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                part.encode({"x": shown}, {})
                torch.cuda.synchronize()
            total = sum(each.self_device_time_total for each in profile.key_averages()) / 1e3
        return total

    @torch.inference_mode()
    def encode_ms(self, side: int) -> float:
        """Return the milliseconds that a GPU takes for patches and vectors of a picture, without the host's time."""
        part = self.engine._worker._runner.inserted._pictures
        shown, _ = self.shown(side, 0)
        times = []
        for _ in range(8):
            if not torch.cuda.is_available():
                begun = time.perf_counter()
                part.encode({"x": shown}, {})
                times.append(1e3 * (time.perf_counter() - begun))
                continue
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            part.encode({"x": shown}, {})
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[2:])


def least_seconds(bench: PictureBench, side: int, requests: int, tokens: int) -> tuple[float, float]:
    """Return the least seconds of (the tower for one picture, all requests); 0 for a device that is not known."""
    device = next(bench.engine._worker._runner.decoder.parameters()).device
    hardware, p = hardware_of(device), precision(str(bench.dtype).removeprefix("torch."))
    if hardware is None:
        return 0.0, 0.0
    shown, _ = bench.shown(side, 0)
    tower = step_limit(list(tower_ops(bench.tower, [shown.patches], p)), hardware, p)
    length = WORDS + shown.vectors
    prompts = step_limit(step_ops(bench.spec, StepShape([length], [length], 1), dtype=p), hardware, p)
    slots = min(requests, bench.llm.engine.config.max_num_seqs)
    decode = StepShape([1] * slots, [length + tokens // 2] * slots, slots)
    decoding = step_limit(step_ops(bench.spec, decode, dtype=p), hardware, p) * (tokens - 1) * requests / slots
    return tower, requests * (tower + prompts) + decoding


def measured(bench: PictureBench, a: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each size of pictures."""
    grid = bench.tower.grid
    sides = a.sides if grid is None or grid.any_shape else [grid.side * bench.patching.rows]
    for side in sides:
        for seed in (-1, -2):
            bench.first(bench.request(side, seed % 2**31, 4))
        bench.all([bench.request(side, 2000 + n, a.tokens) for n in range(a.requests)])  # kernels and graphs
        fresh = [bench.first(bench.request(side, n, 4)) for n in range(a.pictures)]
        misses = bench.engine.scheduler.pictures.misses
        again = [bench.first(bench.request(side, n, 4)) for n in range(a.pictures)]
        encoded = bench.engine.scheduler.pictures.misses - misses
        times = [
            bench.all([bench.request(side, 10_000 * n + 1000 + m, a.tokens) for m in range(a.requests)])
            for n in range(a.rounds)
        ]
        whole = min(times)
        tower, least = least_seconds(bench, side, a.requests, a.tokens)
        if a.beside:
            bench.gaps(a.beside, side, 24)  # graphs are captured behind the first steps that need them
            bench.rest(REST)
        alone, beside, ended = bench.gaps(a.beside, side) if a.beside else ([], [], 0)
        itl = {
            f"{name}_ms": [1e3 * float(np.percentile(each, q)) for q in (50, 99, 100)]
            for name, each in (("itl", alone), ("itl_beside", beside))
            if each
        }
        yield {
            "kind": "pictures",
            "model": a.model.rstrip("/").rpartition("/")[2],
            "side": side,
            "vectors": bench.shown(side, 0)[0].vectors,
            "ttft_ms": 1e3 * statistics.median(fresh),
            "again_ms": 1e3 * statistics.median(again),
            "encoded_again": encoded,
            "tower_ms": bench.encode_ms(side),
            "kernels_ms": bench.kernels_ms(side),
            "tower_limit_ms": 1e3 * tower,
            "requests_per_s": a.requests / whole,
            "all_requests_per_s": [a.requests / each for each in times],
            "limit_per_s": a.requests / least if least else 0.0,
            "share": least / whole,
            "requests": a.requests,
            "tokens": a.tokens,
            **itl,
            **({"rows_beside": a.beside, "prompts_beside": ended} if itl else {}),
        }


def main() -> None:
    a = asked(
        __doc__, model=str, sides=[512, 1024], requests=32, tokens=16, pictures=8, rounds=3, beside=0, options="{}",
        output="",
    )  # fmt: skip
    with told():
        begun = time.perf_counter()
        bench = PictureBench(a.model, **json.loads(a.options))
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
    for line in measured(bench, a):
        print(
            f"{line['model']} {line['side']}²: TTFT {line['ttft_ms']:.1f} ms, again {line['again_ms']:.1f} ms "
            f"({line['encoded_again']} encoded), tower {line['tower_ms']:.2f} ms "
            f"(kernels {line['kernels_ms']:.2f}, limit {line['tower_limit_ms']:.2f}), "
            f"{line['requests_per_s']:.1f} requests/s, {line['share']:.0%} of the limit",
            flush=True,
        )
        for name in ("itl_ms", "itl_beside_ms"):
            if name in line:
                print(
                    f"  {name}: p50 {line[name][0]:.2f}, p99 {line[name][1]:.2f}, most {line[name][2]:.2f}", flush=True
                )
        keep(Path(a.output) if a.output else None, line)


if __name__ == "__main__":
    main()
