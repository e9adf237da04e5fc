"""Attention over the frames of a video: all patches to all, space and time in turn, or a window of frames.

    python -m ridgeline_bench.scripts.frame_attention [--frames 8 16 32 64 128 256] [--patches 256] [--heads 16]
        [--window 4] [--check] [--output FILE.jsonl] [--draw docs/images/frame-attention.svg]
    python -m ridgeline_bench.scripts.frame_attention --draw PICTURE --from FILE.jsonl

A video has F frames of S patches. One layer's attention then has so many pairs of a query and a key that it sees:

    whole     (F·S)²                      every patch sees every other one
    factored  F·S² + S·F²                 patches of its frame, then the same place in all frames
    window    F·S · (2·w·S - 1) at most   patches nearer than w frames of S patches (--window)

All three run by the engine's op for packed rows (`kernels/attention/packed`), heads of 64 channels, bfloat16 on a GPU
and float32 on a CPU. A form is left out where it would take over --most seconds by its FLOPs at the rate of the last
size. --check compares each form with the op's reference at the first size before anything is timed.

The last columns are a decoder's: tokens and MiB of keys and values of the video in a model like Qwen3-VL-8B (144 KiB a
token), if every 2 x 2 patches of every frame are a token, and if two frames share one (tubelets).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.attention.packed.op import PackedRows, packed_attention
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline_bench.machine.timing import QUICK, median_seconds
from ridgeline_bench.results import append_lines
from ridgeline_bench.scripts.asked import asked, check_counts, told
from ridgeline_bench.svg import Panel, picture

HEAD = 64
CACHED = 144 * 1024  # bytes of keys and values of a token of Qwen3-VL-8B
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

Attention = Callable[..., Tensor]


def whole(run: Attention, q: Tensor, k: Tensor, v: Tensor, frames: int, window: int) -> Tensor:
    return run(q, k, v, PackedRows.of(np.array([len(q)])), HEAD**-0.5)


def factored(run: Attention, q: Tensor, k: Tensor, v: Tensor, frames: int, window: int) -> Tensor:
    """Space, then time. The second one's queries, keys and values are the first one's output: a layer would project it
    anew, which costs no attention."""
    patches = len(q) // frames
    x = run(q, k, v, PackedRows.of(np.full(frames, patches)), HEAD**-0.5)
    x = x.view(frames, patches, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    x = run(x, x, x, PackedRows.of(np.full(patches, frames)), HEAD**-0.5)
    return x.view(patches, frames, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def windowed(run: Attention, q: Tensor, k: Tensor, v: Tensor, frames: int, window: int) -> Tensor:
    return run(q, k, v, PackedRows.of(np.array([len(q)])), HEAD**-0.5, window * len(q) // frames)


FORMS: Mapping[str, Callable[..., Tensor]] = {"whole": whole, "factored": factored, "window": windowed}


def pairs(form: str, frames: int, patches: int, window: int) -> float:
    """Return the pairs of a query and a key that it sees."""
    tokens = frames * patches
    if form == "whole":
        return float(tokens) ** 2
    if form == "factored":
        return float(frames * patches**2 + patches * frames**2)
    beyond = max(tokens - window * patches, 0)
    return float(tokens) ** 2 - beyond * (beyond + 1)


def inputs(tokens: int, heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(tokens)
    return [torch.randn(tokens, heads, HEAD, device=device, generator=generator).to(dtype) for _ in range(3)]


def check(run: Attention, given: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidConfig if a form is not what the reference gives."""
    frames = given.frames[0]
    exact = inputs(frames * given.patches, given.heads, device, dtype)
    for name, form in FORMS.items():
        found = form(run, *exact, frames, given.window).float()
        wanted = form(packed_attention, *exact, frames, given.window).float()
        error = float((found - wanted).norm() / wanted.norm())
        print(f"{name}: differs from the reference by {error:.1e} of its norm")
        if not error <= TOLERANCE[dtype]:
            raise InvalidConfig(f"{name} differs from the reference by {error:.1e} of its norm; it is not timed.")


def measured(given: Any, device: torch.device, dtype: torch.dtype, run: Attention) -> list[dict[str, Any]]:
    lines, rate = list[dict[str, Any]](), dict[str, float]()
    print(f"{given.patches} patches a frame, {given.heads} heads of {HEAD}, a window of {given.window} frames, "
          f"{str(dtype).removeprefix('torch.')}: ms, and TFLOP/s")  # fmt: skip
    print(f"{'frames':>6} {'whole':>18} {'factored':>18} {'window':>18} {'x less':>7} {'tokens':>8} {'KV MiB':>8} "
          f"{'tubelets':>8}")  # fmt: skip
    for frames in given.frames:
        q, k, v = inputs(frames * given.patches, given.heads, device, dtype)
        ms, cells = dict[str, float](), []
        for name, form in FORMS.items():
            flops = 4 * HEAD * given.heads * pairs(name, frames, given.patches, given.window)
            if name in rate and flops / rate[name] > given.most:
                cells.append(f"{'over ' + format(flops / rate[name], '.0f') + ' s':>18}")
                continue

            seconds = median_seconds([partial(form, run, q, k, v, frames, given.window)], device, QUICK)
            rate[name], ms[name] = flops / seconds, 1e3 * seconds
            cells.append(f"{1e3 * seconds:>10.2f} {flops / seconds / 1e12:>7.2f}")
            line = {"workload": "frame attention", "form": name, "frames": frames, "patches": given.patches}
            line |= {
                "heads": given.heads,
                "window": given.window,
                "ms": 1e3 * seconds,
                "tflops": flops / seconds / 1e12,
            }
            lines.append({**line, "dtype": str(dtype).removeprefix("torch."), "device": str(device.type)})
        tokens = frames * given.patches // 4
        less = f"{ms['whole'] / ms['factored']:.1f}" if "whole" in ms else ""
        print(f"{frames:>6} {' '.join(cells)} {less:>7} {tokens:>8,} {tokens * CACHED / 2**20:>8,.0f} "
              f"{tokens // 2 * CACHED / 2**20:>8,.0f}", flush=True)  # fmt: skip
    return lines


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    def curves(name: str) -> dict[str, list[tuple[float, float]]]:
        return {form: [(x["frames"], x[name]) for x in lines if x["form"] == form] for form in FORMS}

    panels = [
        Panel("ms of one layer's attention", "frames", curves("ms"), log_y=True),
        Panel("TFLOP/s", "frames", curves("tflops")),
    ]
    path.write_text(picture(panels, f"frames of {lines[0]['patches']} patches"))


def main() -> None:
    given = asked(
        __doc__, frames=[8, 16, 32, 64, 128, 256], patches=256, heads=16, window=4, most=8.0, check=False, output=Path,
        draw=Path, **{"from": Path},
    )  # fmt: skip
    with told():
        check_counts(given, "frames", "patches", "heads", "window")
        if (stored := getattr(given, "from")) is not None:
            every = map(json.loads, stored.read_text(encoding="utf-8").splitlines())
            if not (lines := [line for line in every if line.get("workload") == "frame attention"]):
                raise InvalidConfig(f"{stored} has no line of attention over frames; give one that --output wrote.")
        else:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            run = Ops(Platform.of(device)).packed_attention
            with torch.inference_mode():
                if given.check:
                    check(run, given, device, dtype)
                lines = measured(given, device, dtype, run)
            if given.output is not None:
                append_lines(given.output, lines)
        if given.draw is not None:
            draw(lines, given.draw)


if __name__ == "__main__":
    main()
