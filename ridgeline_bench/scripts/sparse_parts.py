"""Native sparse attention and MoBA by parts, each beside its least time, and whole in turns with dense attention.

    python -m ridgeline_bench.scripts.sparse_parts [--ways NSA MoBA layer] [--lengths 16384 65536] [--repeats 3]
        [--tune choice window selected] [--profile] [--check] [--quick] [--output FILE.jsonl]

Causal, bfloat16, one sequence: NSA with 64 heads in 4 groups, MoBA with 32 heads in as many, 128 channels. `layer` is
the decoder layer of `ladder/expert_layer.py` with each beside that with dense attention by cuDNN. Dense attention is by
cuDNN and, where it is installed, FlashAttention-3. First all is compared with the definition in float64 at a shorter
length. A part's least time is the largest of its FLOPs, bytes and
exponentials at the rates of the chip's data sheet, `share` is that over the time measured. --tune first times other
shapes of NSA's kernels, at the greatest length, and goes on with the fastest. --profile prints the kernels of a call,
--check compares and times nothing, and --quick prints the least times alone, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention import triton_moba, triton_nsa, triton_sdpa, triton_selected
from ridgeline.kernels.attention.ladder.expert_layer import ExpertLayer, ExpertShape, ExpertWeights, keys_read
from ridgeline.kernels.attention.triton_moba import Moba
from ridgeline.kernels.attention.triton_nsa import KeysValues, Nsa
from ridgeline.kernels.attention.triton_sdpa import Tiles
from ridgeline.kernels.attention.triton_selected import Branches, SelectedBlocks
from ridgeline.kernels.cuda.predict import CHIPS, Chip, chip_here
from ridgeline_bench.ladders.attention import libraries
from ridgeline_bench.machine.timing import device_seconds
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import OneOf, asked, keep

Call = Callable[[], object]
NSA, MOBA, SIZE = (64, 4), (32, 32), 128  # heads and groups
WITHIN = 1e-2  # of the norm in float64
TURN = 0.25  # seconds


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """Return calls of dense attention, each on operands as it wants them."""
    by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    laid = {name: (q, k, v) if "SDPA" in name else by_token for name in libraries() if "Attention-2" not in name}
    return {name: lambda name=name, x=x: libraries()[name](*x) for name, x in laid.items()}  # type: ignore[misc]


def least(flops: float, moved: float, exponentials: float, chip: Chip) -> dict[str, float]:
    """Return the least seconds of each resource."""
    rate = chip.exponentials * chip.multiprocessors * chip.clock
    return {"FLOPs": flops / chip.matrix, "bytes": moved / chip.bandwidth, "exponentials": exponentials / rate}


def nsa_least(tokens: int, chip: Chip, nsa: Nsa = Nsa()) -> dict[str, dict[str, float]]:
    """Return the least seconds of each part and resource. Bytes are those of memory; of selected blocks the parts too,
    which are written and read once."""
    heads, groups = NSA
    t = torch.arange(tokens, dtype=torch.float64) + 1
    coarse = heads * float(((t - nsa.length) // nsa.stride + 1).clamp(min=0).sum())
    near, chosen = (heads * float(t.clamp(max=n).sum()) for n in (nsa.window, nsa.selected * nsa.block))
    row, keys = 2.0 * heads * tokens * SIZE, 4.0 * groups * tokens * SIZE  # bytes of q or outputs, and of k and v
    always = nsa.first + nsa.last  # one part of all these
    pairs = float(((t / nsa.block).ceil().clamp(max=nsa.selected) - always).clamp(min=0).sum()) + tokens
    product = 4 * SIZE
    return {
        "compress": least(0, keys + keys / nsa.stride, 0, chip),
        "compressed": least(product * coarse, 2 * row + keys / nsa.stride, coarse, chip),
        "choice": least(product / 2 * coarse, row + keys / nsa.stride, coarse, chip),
        "window": least(product * near, 2 * row + keys, near, chip),
        "selected, gates": least(product * chosen, 4 * row + keys + 2 * row / tokens * pairs, chosen, chip),
    }


def moba_least(tokens: int, chip: Chip, moba: Moba = Moba()) -> dict[str, dict[str, float]]:
    heads, groups = MOBA
    count = heads * keys_read(moba, tokens)
    row, keys = 2.0 * heads * tokens * SIZE, 4.0 * groups * tokens * SIZE
    means = 2 * SIZE * heads * float((torch.arange(tokens) // moba.block).sum())
    return {
        "choice": least(3 * means, row + keys / 2, 0, chip),
        "attention": least(4 * SIZE * count, 4 * row + keys + 4 * row * (moba.top - 1), count, chip),
    }


class NsaParts:
    """NSA's inputs and its parts, each on the results of those before it."""

    def __init__(self, tokens: int, groups: int = NSA[1], heads: int = NSA[0]) -> None:
        self.nsa, self.scale, self.tokens = Nsa(), SIZE**-0.5, tokens
        self.q, self.k, self.v = (draw(1, each, tokens, SIZE) for each in (heads, groups, groups))
        self.weights = torch.randn(self.nsa.length, SIZE, device="cuda").softmax(0)
        self.gates = draw(1, heads, tokens, 3).sigmoid()
        self.coarse = self.compress()
        (self.compressed, self.log), self.near = self.attend_compressed(), self.window()
        self.chosen = self.choose()

    def compress(self) -> KeysValues:
        return KeysValues(*(triton_nsa.compress(x, self.weights, self.nsa) for x in (self.k, self.v)))

    def attend_compressed(self) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_nsa.attend_compressed(self.q, self.coarse, self.nsa, scale=self.scale)

    def choose(self) -> torch.Tensor:
        return triton_nsa.choose(self.q, self.coarse.k, self.log, self.nsa, scale=self.scale)

    def window(self) -> torch.Tensor:
        return triton_nsa.attend_window(self.q, KeysValues(self.k, self.v), self.nsa, scale=self.scale)

    def selected(self) -> torch.Tensor:
        branches, nsa = Branches(self.compressed, self.near, self.gates), self.nsa
        blocks = SelectedBlocks(nsa.block, nsa.first, nsa.last)
        return triton_selected.add_selected(self.q, self.k, self.v, self.chosen, branches, blocks, scale=self.scale)

    def whole(self) -> torch.Tensor:
        pair = KeysValues(self.k, self.v)
        return triton_nsa.nsa_attention(self.q, self.compress(), pair, pair, self.gates, self.nsa)

    def parts(self) -> dict[str, Call]:
        return {
            "compress": self.compress, "compressed": self.attend_compressed, "choice": self.choose,
            "window": self.window, "selected, gates": self.selected, "whole": self.whole,
        }  # fmt: skip

    def error(self) -> float:
        """Return the error of the whole over its norm, in float64 with the blocks that were chosen here."""
        q, k, v, gates = (x.double() for x in (self.q, self.k, self.v, self.gates))
        at = torch.arange(self.tokens, device=q.device)
        _, behind = triton_nsa.compressed_intervals(self.tokens, self.nsa, q.device)
        coarse = [x.double() for x in self.coarse]
        seen = torch.arange(coarse[0].shape[2], device=q.device) < behind[:, None]
        picked = (self.chosen.long()[..., None, :] == (at // self.nsa.block)[:, None]).any(-1) & (at <= at[:, None])
        near = (at <= at[:, None]) & (at > at[:, None] - self.nsa.window)
        want = torch.zeros_like(q)
        for i, (kv, mask) in enumerate(((coarse, seen), ((k, v), picked), ((k, v), near))):
            mask = mask.repeat_interleave(q.shape[1] // k.shape[1], 1) if mask.dim() == 4 else mask
            out = scaled_dot_product_attention(q, *kv, attn_mask=mask, enable_gqa=True)
            want += torch.where(mask.any(-1, keepdim=True), out, 0.0) * gates[..., i, None]
        return float((self.whole().double() - want).norm() / want.norm())

    def compressed_error(self) -> float:
        """Return the largest difference of the compressed branch from that of intervals, outputs and logarithms, of
        queries by head and by token."""
        found = []
        for by_token in (False, True):
            q = self.q.transpose(1, 2).contiguous().transpose(1, 2) if by_token else self.q
            ours = triton_nsa.attend_compressed(q, self.coarse, self.nsa, scale=self.scale)
            intervals = triton_nsa.compressed_intervals(self.tokens, self.nsa, q.device)
            want = triton_sdpa.attend_intervals(q, *self.coarse, intervals, self.scale)
            for a, b in zip(ours, want, strict=True):
                same = torch.where(a == b, 0.0, (a - b).abs().float())  # of inf too
                found.append(float(same.max() / b[:, :, 40:].abs().float().max()))
        return max(found)

    def right_choices(self) -> float:
        """Return the share of choices that are those by the whole matrix of importance."""
        matrix = triton_nsa.importance(self.q, self.coarse.k, self.log, self.nsa, scale=self.scale)
        return (triton_nsa.select(matrix, self.nsa) == self.chosen).float().mean().item()


def moba_error(tokens: int) -> float:
    q, k, v = (draw(1, heads, tokens, SIZE) for heads in (4, 2, 2))
    moba = Moba(512)
    want = triton_moba.moba_reference(q.double(), k.double(), v.double(), moba)
    return float((triton_moba.moba_attention(q, k, v, moba).double() - want).norm() / want.norm())


def check(ways: list[str]) -> None:
    """Raise SystemExit if a result is wrong."""
    errors = {}
    if "NSA" in ways:
        for tokens in (2512, 4096):
            short = NsaParts(tokens, 2, 32)
            errors[f"NSA, {tokens} tokens"] = short.error()
            errors[f"compressed, {tokens} tokens"] = short.compressed_error()
            same = short.right_choices()
            print(f"NSA, {tokens} tokens: {100 * same:.2f} % of choices as by the whole matrix")
            if same < 0.999:
                raise SystemExit("choices are wrong")
    if "MoBA" in ways:
        errors["MoBA, 3000 tokens"] = moba_error(3000)
    print(", ".join(f"{name}: error {each:.2e}" for name, each in errors.items()))
    wrong = [name for name, each in errors.items() if not each < WITHIN]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: wrong by more than {WITHIN} of the norm.")


def in_turns(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Return the median seconds of calls that take turns. Each runs for a quarter of a second at a time, so that it
    has the clock that its own power leaves it, and not that of the call before."""
    with torch.no_grad():
        for call in calls.values():
            call()
        often = [max(1, round(TURN / device_seconds(call))) for call in calls.values()]
        turns = list(zip(calls.values(), often, strict=True))
        times = [[device_seconds(call, count) for call, count in turns] for _ in range(repeats)]
    return {name: sorted(of)[repeats // 2] for name, of in zip(calls, zip(*times, strict=True), strict=True)}


def rows(way: str, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a way at a length: parts, the whole and the dense peer in turns."""
    chip = chip_here(gpu())
    if way == "none":
        return
    if way == "layer":
        yield from layers(tokens, repeats)
        return
    if way == "NSA":
        nsa, heads, groups = NsaParts(tokens), *NSA
        calls, limits = nsa.parts(), nsa_least(tokens, chip)
        q, k, v = nsa.q, nsa.k, nsa.v
    else:
        heads, groups = MOBA
        q, k, v = (draw(1, each, tokens, SIZE) for each in (heads, groups, groups))
        calls, limits = {
            "choice": lambda: triton_moba.choose_blocks(q, k, Moba()),
            "whole": lambda: triton_moba.moba_attention(q, k, v),
        }, moba_least(tokens, chip)  # fmt: skip
    dense_ways = peers(q, k, v)
    times = in_turns({**dense_ways, **calls}, repeats)
    for part, seconds in times.items():
        bound = limits.get(part, {})
        whole = sum(max(each.values()) for each in limits.values()) if part == "whole" else None
        yield {
            "workload": "parts of sparse attention", "way": way, "length": tokens, "heads": heads, "groups": groups,
            "part": part, "seconds": seconds, "least": max(bound.values(), default=whole), "limits": bound,
            "times faster": {name: times[name] / seconds for name in dense_ways} if part == "whole" else {},
        }  # fmt: skip


def layer_weights(shape: ExpertShape, nsa: Nsa) -> ExpertWeights:
    """Return random weights of a layer with native sparse attention, each row of about unit length."""

    def rows(*sizes: int) -> torch.Tensor:
        return draw(*sizes) * sizes[-1] ** -0.5

    s, (model, wide) = shape, (shape.model, shape.heads * shape.size)
    return ExpertWeights(
        draw(model), rows(wide, model), rows(6 * s.groups * s.size, model), rows(model, wide), draw(model),
        rows(s.experts, model), rows(s.experts, 2 * s.inner, model), rows(s.experts, model, s.inner),
        draw(nsa.length, s.size).softmax(0), rows(3 * s.heads, model), draw(3 * s.heads),
    )  # fmt: skip


def layers(tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the records of the decoder layer with each attention, in turns."""
    shape, x, nsa = ExpertShape(), draw(1, tokens, ExpertShape().model), Nsa()
    three = layer_weights(shape, nsa)
    one = replace(three, kv_XM=three.kv_XM[: 2 * shape.groups * shape.size], gates_YM=None, gates_Y=None)
    ways = {
        "NSA": ExpertLayer(shape, three, nsa), "MoBA": ExpertLayer(shape, one, Moba()),
        "all keys": ExpertLayer(shape, one, None),
    }  # fmt: skip
    with patch("ridgeline.kernels.attention.ladder.expert_layer.sdpa", dense):
        times = in_turns({name: lambda layer=layer: layer(x) for name, layer in ways.items()}, repeats)
    for name, seconds in times.items():
        yield {
            "workload": "layer with sparse attention", "way": name, "length": tokens, "heads": shape.heads,
            "groups": shape.groups, "part": "layer", "seconds": seconds,
            "times faster": {"all keys": times["all keys"] / seconds},
        }  # fmt: skip


class Limited(Tiles):
    """Tiles whose kernel has at most 128 registers a thread."""

    @property
    def launch(self) -> dict[str, int]:
        return {**super().launch, "maxnreg": 128}


def shapes() -> dict[tuple[str, str], dict[str, Callable[[], None]]]:
    """Return the shapes of NSA's kernels by part and by what varies: calls that set them, the present one first."""

    def products(tiles: Tiles, registers: int) -> None:
        triton_selected.chosen_tiles = lambda *_: tiles
        triton_selected.REGISTERS = registers

    def choice(tiles: Tiles) -> None:
        triton_nsa.choice_tiles = lambda *_: tiles

    def text(t: Tiles) -> str:
        limit = ", 128 registers" if isinstance(t, Limited) else ""
        return f"{t.rows} x {t.columns}, {t.warps} warps, {t.stages} stages{limit}"

    def named(call: Callable[..., None], *given: Any) -> Callable[[], None]:
        return lambda: call(*given)

    both = [(Tiles(64, 64, 4, 1), n) for n in (168, 128)] + [(Tiles(x, 64, 8, 1), 128) for x in (64, 128)]
    choices = [Tiles(64, 128, 4, 3), Tiles(64, 128, 8, 3), Limited(64, 128, 8, 3), Tiles(64, 64, 4, 3)]
    choices += [Tiles(64, 256, 8, 3), Tiles(64, 128, 4, 2)]
    near = [Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 128, 4, 2)]
    selected = "selected, gates"
    return {
        (selected, "listed"): {str(n): named(setattr, triton_selected, "LISTED", n) for n in (8192, 4096, 16384)},
        (selected, "together"): {str(n): named(setattr, triton_selected, "TOGETHER", n) for n in (32, 16, 64)},
        (selected, "tiles"): {f"{t.rows} rows, {t.warps} warps, {n} registers": named(products, t, n) for t, n in both},
        ("choice", "tiles"): {text(t): named(choice, t) for t in choices},
        ("window", "tiles"): {
            text(t): named(triton_sdpa.TILES.__setitem__, ("near", 128), t) for t in near
        },
    }  # fmt: skip


def tune(tokens: int, repeats: int, parts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the times of NSA's kernels in other shapes, one thing varied at a time, and leave the fastest set."""
    nsa = NsaParts(tokens)
    for (part, what), ways in shapes().items():
        if part.split(",")[0] not in parts:
            continue
        times = {}
        for name, change in ways.items():
            change()
            times[name] = in_turns({part: nsa.parts()[part]}, repeats)[part]
            yield {
                "workload": "variants of sparse attention", "way": "NSA", "length": tokens,
                "part": f"{part}: {what} {name}", "seconds": times[name],
            }  # fmt: skip
        first = next(iter(ways))
        best = min(times, key=lambda name: times[name])
        ways[best if times[best] < 0.99 * times[first] else first]()


def profile(ways: list[str], lengths: list[int]) -> None:
    """Print the kernels of a call of each way that take the most time."""
    for way in ways:
        for tokens in lengths:
            q, k, v = (draw(1, each, tokens, SIZE) for each in (MOBA[0], MOBA[1], MOBA[1]))
            call = NsaParts(tokens).whole if way == "NSA" else lambda q=q, k=k, v=v: triton_moba.moba_attention(q, k, v)
            with torch.no_grad():
                call()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                    call()
                    torch.cuda.synchronize()
            found = sorted(seen.key_averages(), key=lambda each: -each.device_time_total)[:8]
            kernels = ", ".join(f"{x.key[:28]} {x.device_time_total / 1e3:.2f} ({x.count})" for x in found)
            print(f"{way}, {tokens} tokens, ms: {kernels}")


def _lines(ways: list[str], tuned: list[str], lengths: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    if tuned:
        yield from tune(max(lengths), repeats, tuned)
    for tokens in lengths:
        for way in ways:
            yield from rows(way, tokens, repeats)


def main() -> None:
    a = asked(
        __doc__, ways=[OneOf(("NSA", "MoBA", "layer", "none"))], lengths=[16384, 65536], repeats=3,
        tune=([str], "parts of NSA to time in other shapes first: choice, window, selected"),
        profile=False, check=False, quick=False, output=Path,
    )  # fmt: skip
    table = Table("length", "way", "part", "least ms", "limit", "ms", "share", "times faster")
    if a.quick:
        for tokens in a.lengths:
            for way, found in (("NSA", nsa_least(tokens, CHIPS[1])), ("MoBA", moba_least(tokens, CHIPS[1]))):
                for part, of in found.items():
                    most = max(of, key=lambda what, of=of: of[what])
                    table.add_row(f"{tokens:,}", way, part, f"{1e3 * of[most]:.2f}", most)
        Console(width=120).print(table)
        return
    if a.profile:
        profile([way for way in a.ways if way in ("NSA", "MoBA")], a.lengths)
        return
    check(a.ways)
    if a.check:
        return
    with torch.no_grad():
        for line in _lines(a.ways, a.tune or [], a.lengths, a.repeats):
            tokens = line["length"]
            keep(a.output, {"gpu": gpu(), "dtype": "bfloat16", "channels": SIZE, **line})
            bound, best = line.get("limits") or {}, line.get("least")
            limit = max(bound, key=lambda what, bound=bound: bound[what]) if bound else ""
            share, faster = best and best / line["seconds"], line.get("times faster", {})
            table.add_row(
                f"{tokens:,}", line["way"], line["part"], f"{1e3 * best:.2f}" if best else "", limit,
                f"{1e3 * line['seconds']:.2f}", f"{share:.2f}" if share else "",
                ", ".join(f"{x:.2f} {name.removeprefix('SDPA, ')}" for name, x in faster.items()),
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
