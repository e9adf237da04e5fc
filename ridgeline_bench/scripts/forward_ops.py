"""The ops of one forward pass of GPT-2 under torch's profiler, the slowest first, and what bounds each.

    python -m ridgeline_bench.scripts.forward_ops [--shapes 1x1 1x128 8x1024] [--dtype bfloat16] [--device auto]
        [--layers 12] [--passes 5] [--top 6] [--threads 0] [--commit ""]
        [--output FILE.jsonl]

The model is transformers' GPT2LMHeadModel with random weights of the smallest one's shape: 12 layers of 768 with 12
heads, and 50,257 tokens. A shape is BATCHxTOKENS. An op is one of torch's with one set of input shapes. Its time is its
own kernels' on a GPU; on a CPU it is without that of ops inside it.

Two roofs are measured in the same run: a copy of 256 MiB (64 on a CPU), and the product of squares of 4096 (1024) in
the same dtype. An op's bytes are those of its inputs and its result, each once; its FLOPs are those of its products.
--threads is how many compute on a CPU, 0 as many as torch takes.

    compute     FLOPs over the product's rate take longer than bytes over the copy's
    memory      the other way round
    launch      a GPU's op takes less time than its launch by the host; on a CPU, than two ops that do nothing
    view        it takes no time on the device

`of roof` is the longer one of both times, of the time that the op took. Bytes that stay in a cache make it more than
100 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.kernels import dtype_called
from ridgeline_bench.machine.timing import QUICK, host_seconds, median_seconds
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear")
LOOKUPS = ("aten::index_select", "aten::embedding")
ATTENTION = "attention"  # in the name of every way in which torch computes it
BY_TOKENS = (
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
)  # [B, T, H, D], others [B, H, T, D]


@dataclass(frozen=True)
class Roofs:
    """Rates of a device: bytes and FLOPs a second, and the seconds below which the launch bounds an op."""

    bandwidth: float
    product: float
    launch: float


@dataclass(frozen=True)
class ForwardOp:
    """An op of one pass: its name, the shapes of its tensors, how often it ran, and seconds of all calls."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int
    seconds: float

    @property
    def label(self) -> str:
        shown = [" x ".join(map(str, shape)) for shape in self.shapes if shape][:3]
        return f"{self.name.removeprefix('aten::')} [{'] ['.join(shown)}]"

    @property
    def flops(self) -> float:
        """FLOPs of a call."""
        if ATTENTION in self.name and len(self.shapes) >= 3:
            query, key = self.shapes[:2]
            tokens = key[1 if self.name in BY_TOKENS else 2]
            return 4.0 * prod(query) * tokens / 2  # two products, of which causal order leaves half
        if self.name in PRODUCTS:
            left, right = self._factors()
            return 2.0 * prod(left) * right[-1]
        return 0.0

    def nbytes(self, item: int) -> float:
        """Bytes of inputs and result of a call, of numbers of so many bytes."""
        if self.name in LOOKUPS:  # rows of a table, once read and once written
            table, places = self.shapes[0], next(shape for shape in self.shapes[1:] if shape)
            return 2.0 * item * prod(places) * table[-1]
        read = sum(prod(shape) for shape in self.shapes if shape)
        if self.name in PRODUCTS:
            left, right = self._factors()
            written = prod(left[:-1]) * right[-1]
        else:
            written = max((prod(shape) for shape in self.shapes if shape), default=0)
        return float(item * (read + written))

    def _factors(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        left, right = self.shapes[1:3] if self.name == "aten::addmm" else self.shapes[:2]
        return left, (right[-2:][::-1] if self.name == "aten::linear" else right)

    def bound(self, roofs: Roofs, item: int) -> tuple[str, float]:
        """Return what bounds a call, and the share of its time that this explains."""
        each = self.seconds / self.calls
        if not each:
            return "view", 0.0
        computed, moved = self.flops / roofs.product, self.nbytes(item) / roofs.bandwidth
        share = max(computed, moved) / each
        if each < roofs.launch:
            return "launch", share
        return ("compute" if computed > moved else "memory"), share


def roofs(device: torch.device, dtype: torch.dtype) -> Roofs:
    """Measure the rates of a device."""
    on_gpu = device.type == "cuda"
    x = torch.randn((256 if on_gpu else 64) << 18, device=device)
    y, one = torch.empty_like(x), torch.zeros(1, device=device)
    a = torch.randn(4096 if on_gpu else 1024, 4096 if on_gpu else 1024, device=device).to(dtype)
    out = torch.empty_like(a)

    def seconds(call: Any) -> float:
        return median_seconds([call], device, QUICK)

    return Roofs(
        bandwidth=2 * x.nbytes / seconds(lambda: y.copy_(x)),
        product=2.0 * len(a) ** 3 / seconds(lambda: torch.mm(a, a, out=out)),
        launch=host_seconds(one.neg_, device, calls=256, effort=QUICK) if on_gpu else 2 * seconds(one.neg_),
    )


def gpt2(layers: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return GPT-2 with random weights."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise InvalidConfig("GPT-2 needs the package transformers; install it.") from error
    return GPT2LMHeadModel(GPT2Config(n_layer=layers)).to(device, dtype).eval()


def profiled(model: Any, ids_BT: torch.Tensor, passes: int) -> list[ForwardOp]:
    """Return the ops of a forward pass, the slowest first. Times are means of so many passes, after three others."""
    on_gpu = ids_BT.is_cuda
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.inference_mode():
        for _ in range(3):
            model(ids_BT)
        with torch.profiler.profile(activities=activities, record_shapes=True) as seen:
            for _ in range(passes):
                model(ids_BT)
            if on_gpu:
                torch.cuda.synchronize()
    found = []
    for each in seen.key_averages(group_by_input_shape=True):
        micros = each.self_device_time_total if on_gpu else each.self_cpu_time_total
        if each.key.startswith("aten::") and each.count >= passes:
            shapes = tuple(tuple(shape) for shape in each.input_shapes)
            found.append(ForwardOp(each.key, shapes, each.count // passes, micros / 1e6 / passes))
    return sorted(found, key=lambda op: -op.seconds)


def lines(ops: Sequence[ForwardOp], ceiling: Roofs, item: int, top: int) -> list[dict[str, Any]]:
    """Return the first ops with what bounds them, as fields of a result."""
    total, found = sum(op.seconds for op in ops), []
    for op in ops[:top]:
        bound, share = op.bound(ceiling, item)
        found.append(
            {
                "op": op.label, "calls": op.calls, "us": round(1e6 * op.seconds, 2),
                "share": round(op.seconds / total, 4), "flops": op.flops, "bytes": op.nbytes(item), "bound": bound,
                "of roof": round(share, 3),
            }
        )  # fmt: skip
    return found


def _shape(word: str) -> tuple[int, int]:
    batch, _, tokens = word.partition("x")
    if not (batch.isdigit() and tokens.isdigit() and int(batch) and 0 < int(tokens) <= 1024):
        raise InvalidConfig(f"--shapes has {word!r}; write BATCHxTOKENS with at most 1024 tokens, such as 8x1024.")
    return int(batch), int(tokens)


def main() -> None:
    given = asked(
        __doc__, shapes=["1x1", "1x128", "8x1024"], dtype="bfloat16", device="auto", layers=12, passes=5, top=6,
        threads=0, commit=("", "of the checkout, where git cannot say it"), output=Path,
    )  # fmt: skip
    with told():
        check_counts(given, "layers", "passes", "top")
        shapes, dtype = [_shape(word) for word in given.shapes], dtype_called(given.dtype)
        if given.threads > 0:
            torch.set_num_threads(given.threads)
        name = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        model, ceiling = gpt2(given.layers, dtype, device), roofs(device, dtype)
        console = Console()
        console.print(
            f"GPT-2, {given.layers} layers, {given.dtype} on {device}: copy {ceiling.bandwidth / 1e9:,.0f} GB/s, "
            f"product {ceiling.product / 1e12:,.2f} TFLOP/s, so {ceiling.product / ceiling.bandwidth:,.0f} FLOPs a "
            f"byte; ops below {1e6 * ceiling.launch:.1f} µs are bound by their launch"
        )
        for batch, tokens in shapes:
            ids = torch.randint(0, 50257, (batch, tokens), device=device)
            ops = profiled(model, ids, given.passes)
            found = lines(ops, ceiling, dtype.itemsize, given.top)
            total = sum(op.seconds for op in ops)
            table = Table(
                "op", "calls", "ms", "share", "FLOPs a byte", "bound by", "of roof", title=f"{batch} x {tokens}"
            )
            for each in found:
                dense = f"{each['flops'] / each['bytes']:.1f}" if each["bytes"] else ""
                table.add_row(
                    each["op"], str(each["calls"]), f"{each['us'] / 1e3:.3f}", f"{each['share']:.1%}", dense,
                    each["bound"], f"{each['of roof']:.0%}",
                )  # fmt: skip
            console.print(table)
            record = {
                "kind": "forward ops", "model": f"gpt2, {given.layers} layers", "dtype": given.dtype,
                "device": device.type, "batch": batch, "tokens": tokens, "us": round(1e6 * total, 1), "ops": found,
                "roofs": {key: float(f"{value:.4g}") for key, value in vars(ceiling).items()},
            }  # fmt: skip
            keep(given.output, {**record, "machine": asdict(host_with(device, given.commit))})


if __name__ == "__main__":
    main()
