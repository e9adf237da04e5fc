"""Prompts with a video through one engine: tokens, keys and values, the tower, and TTFT by length and resolution.

    python -m ridgeline_bench.scripts.videos --model FOLDER [--frames 16 64 256] [--sides 256 512 1024] [--videos 3]
        [--tokens 16] [--options JSON] [--output FILE.jsonl]

FOLDER has config.json and the processor's files of a model that sees videos. Weights are random unless --options says
'{"load_format": "auto"}'. A video is frames of random pixels, two a second, and its prompt has 64 other tokens. No two
are alike unless it says so. The processor makes frames smaller where there are many, and sizes that come to the same
are measured once. One request runs at a time:

    TTFT      ms from the request to its first token: the median of --videos
    again     the same of a video that was there before, whose vectors are kept if there is room for them; other words
              stand in front of it, so no blocks are found
    tower     ms of TTFT in which the device makes patches and vectors
    prompt    the rest of it
    step      ms of a decode step behind that video
    KV        bytes of keys and values of the prompt
    limit     of TTFT by arithmetic, at the rates that the device attains (`picture_costs`); 0: the device is not known
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.media.items import Clip, clip
from ridgeline.media.layout import VideoProcessor
from ridgeline.perf.footprint import kv_bytes_per_token
from ridgeline.text.media_prompt import placed_items
from ridgeline.worker.machine import hardware_of
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told
from ridgeline_bench.scripts.picture_costs import WORD, Beside, Seen, filmed, read
from ridgeline_bench.scripts.pictures import PictureBench
from ridgeline_bench.svg import Panel, picture

RATE = 2.0  # frames a second
TEXT = 64  # tokens beside a video


def drawn(frames: int, side: int, seed: int) -> Clip:
    """Return a video of random pixels."""
    pixels_FHWC = np.random.default_rng(seed).integers(0, 256, (frames, side, side, 3), dtype=np.uint8)
    return clip(pixels_FHWC, np.arange(frames) / RATE, RATE)


def request(number: int, seen: Seen, video: Clip, tokens: int) -> Request:
    """Return a request with a video in the middle of words. Texts that the processor writes side by side are one
    token."""
    [own] = placed_items(seen.processor, [video])
    words = [number % 90 + 10 + n for n in range(TEXT)]
    ids, inserted, run = words[: TEXT // 2], list[Inserted](), 0
    for piece in own.layout.pieces:
        if isinstance(piece, str):
            ids += [WORD] * (ids[-1] != WORD)
            continue
        inserted.append(own.inserted(run, len(ids)))
        ids += [8] * piece
        run += 1
    ids += words[TEXT // 2 :]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(
        id=str(number), prompt_token_ids=tuple(ids), params=params, seed=0, max_total_tokens=len(ids) + tokens,
        inserted=tuple(inserted),
    )  # fmt: skip


class VideoBench:
    """An engine that sees videos, and what the folder's processor makes of these."""

    def __init__(self, model: str, **options: Any) -> None:
        self.seen = read(Path(model))
        self.bench = PictureBench(model, **options)
        self._made = 0

    def asked(self, video: Clip, tokens: int) -> Request:
        self._made += 1
        return request(self._made, self.seen, video, tokens)

    def timed(self, asked: Request) -> tuple[float, float, float]:
        """Return the seconds to the first token, those of the tower, and those between two tokens."""
        engine, worker = self.bench.engine, self.bench.llm.assembly.local
        before = worker.figures().encoder
        begun, moments = time.perf_counter(), list[float]()
        engine.add(asked)
        while engine.has_work:
            for event in engine.step():
                if event.error:
                    raise RuntimeError(event.error)
                if event.token_id >= 0:
                    moments.append(time.perf_counter())
        after = worker.figures().encoder
        assert before is not None
        assert after is not None
        gaps = np.diff(moments)
        return moments[0] - begun, after.seconds - before.seconds, float(np.median(gaps)) if len(gaps) else 0.0


def measured(bench: VideoBench, a: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each number of frames and size that the tower sees."""
    spec, done = bench.bench.spec, set[tuple[int, tuple[int, int]]]()
    dtype = str(bench.bench.dtype).removeprefix("torch.")
    hardware = hardware_of(next(bench.bench.engine._worker._runner.decoder.parameters()).device)
    processor = bench.seen.processor
    assert isinstance(processor, VideoProcessor)
    for frames in a.frames:
        for side in a.sides:
            layout = processor.video([each / RATE for each in range(frames)], side, side, RATE)
            if (key := (frames, layout.views[0].size)) in done:
                continue
            done.add(key)
            seed = 1000 * frames + side
            for warm in range(2):  # kernels, and graphs of these sizes
                bench.timed(bench.asked(drawn(frames, side, seed + 500 + warm), a.tokens))
            fresh = [bench.timed(bench.asked(drawn(frames, side, seed + n), a.tokens)) for n in range(a.videos)]
            again = bench.timed(last := bench.asked(drawn(frames, side, seed + a.videos - 1), a.tokens))
            least = 0.0
            if hardware is not None and dtype == "bfloat16":
                work = filmed(bench.seen, frames, side, Beside(text=TEXT), hardware.attained())
                least = work.tower + work.prompt
            first, tower = (1e3 * statistics.median(each[n] for each in fresh) for n in (0, 1))
            tokens = len(last.prompt_token_ids)
            yield {
                "workload": "videos", "model": bench.seen.name, "frames": frames, "side": side,
                "seen": list(key[1]), "tokens": tokens, "kv_bytes": tokens * kv_bytes_per_token(spec, dtype),
                "dtype": dtype, "ttft_ms": first, "tower_ms": tower, "prompt_ms": first - tower,
                "again_ms": 1e3 * again[0], "again_tower_ms": 1e3 * again[1],
                "step_ms": 1e3 * statistics.median(each[2] for each in fresh), "limit_ms": 1e3 * least,
                "videos": a.videos,
            }  # fmt: skip


def drawn_lengths(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw TTFT, its limit and the cache over the frames, by the size that is seen."""

    def curves(name: str, scale: float = 1.0) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            found.setdefault("{} x {}".format(*line["seen"]), []).append((line["frames"], line[name] * scale))
        return found

    panels = [
        Panel("TTFT, ms", "frames", curves("ttft_ms"), log_y=True),
        Panel("of which tower, ms", "frames", curves("tower_ms"), log_y=True),
        Panel("keys and values, MiB", "frames", curves("kv_bytes", 1 / 2**20), log_y=True),
    ]
    path.write_text(picture(panels, "a video in Qwen3-VL-8B's shape by frames and pixels, one H200"))


def main() -> None:
    a = asked(
        __doc__, model=str, frames=[16, 64, 256], sides=[256, 512, 1024], videos=3, tokens=16, options="{}",
        output="",
    )  # fmt: skip
    with told():
        check_counts(a, "frames", "sides", "videos", "tokens")
        filmed_model = read(Path(a.model))
        if not isinstance(filmed_model.processor, VideoProcessor):
            raise InvalidConfig(f"{filmed_model.name} sees no videos; give another --model.")
        begun = time.perf_counter()
        bench = VideoBench(a.model, **json.loads(a.options))
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
    print(f"{'frames':>6} {'seen':>11} {'tokens':>7} {'KV MiB':>7} {'TTFT ms':>8} {'tower':>7} {'prompt':>7} "
          f"{'again':>7} {'step':>6} {'limit':>6}")  # fmt: skip
    for line in measured(bench, a):
        seen = f"{line['seen'][0]}x{line['seen'][1]}"
        print(f"{line['frames']:>6} {seen:>11} {line['tokens']:>7} {line['kv_bytes'] / 2**20:>7.1f} "
              f"{line['ttft_ms']:>8.1f} {line['tower_ms']:>7.1f} {line['prompt_ms']:>7.1f} {line['again_ms']:>7.1f} "
              f"{line['step_ms']:>6.2f} {line['limit_ms']:>6.1f}", flush=True)  # fmt: skip
        keep(Path(a.output) if a.output else None, line)


if __name__ == "__main__":
    main()
