"""What Inductor makes of a Llama block and of small patterns in its modes, and when a mode is slower than torch alone.

    python -m ridgeline_bench.scripts.stack.modes --output results.jsonl [--seconds 120]
    python -m ridgeline_bench.scripts.stack.modes --small             # tiny sizes, for a CPU

Each case is run as torch runs it and compiled in each mode, and must agree with torch before it has a figure. A line
names the kernels of the generated code, by their kind, and the ops that each fuses; the calls of libraries; graph
breaks; guards; seconds of the first call; and the median time of a call from the host's clock, with a wait behind each
run of calls, so what launching costs is in it. Inductor's caches on disk are left out.
"""

from __future__ import annotations

import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline_bench.scripts.asked import OneOf, asked, keep, told

MODES = ("default", "reduce-overhead", "max-autotune")
KINDS = {"poi": "pointwise", "red": "reduction", "per": "persistent reduction", "tem": "product", "for": "foreach"}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2}  # of the largest number: fused kernels round less often


class Case(NamedTuple):
    """A function and its inputs."""

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


class BlockSizes(NamedTuple):
    """Sizes of a Llama block: those of 8B, or small ones."""

    width: int
    hidden: int
    heads: int
    kv_heads: int


LLAMA_8B, SMALL = BlockSizes(4096, 14336, 32, 8), BlockSizes(64, 128, 4, 2)


def block(sizes: BlockSizes, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return transformers' layer of Llama with random weights."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=sizes.width, intermediate_size=sizes.hidden, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, num_hidden_layers=1, vocab_size=64, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        layer = LlamaDecoderLayer(config, 0).to(dtype).eval()
    layer.requires_grad_(False)
    return layer


def block_case(layer: nn.Module, sizes: BlockSizes, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    x = torch.randn(1, tokens, sizes.width, device=device, dtype=dtype)
    angles = torch.randn(1, tokens, sizes.width // sizes.heads, device=device)

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        found: Tensor = layer(x, position_embeddings=(cos, sin))
        return found

    return Case(f"Llama block, {tokens} tokens", run, (x, angles.cos().to(dtype), angles.sin().to(dtype)))


def _chain(x: Tensor, w: Tensor) -> Tensor:
    return functional.silu(x) * w + x.sigmoid()


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x + w, x.shape[-1:], w, 1e-6)


def _softmax_of_a_chain(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x * w, -1) * w


def _two_readers(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack((x.relu().sum(-1), (x * w).amax(-1)))


def _product_and_gelu(x: Tensor, w: Tensor) -> Tensor:
    return functional.gelu(x @ w.expand(x.shape[-1], -1).T, approximate="tanh") + 1.0


def _gather_and_add(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.arange(len(x), device=x.device) // 2
    return functional.embedding(rows, x) + w


def _joined(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat((x * w, x.neg()), -1) + 1.0


def _turned(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).T.contiguous().exp()


def _running_sum(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * w.float() / x.shape[-1]).cumsum(-1) * 2.0


PATTERNS = {
    "pointwise chain": _chain, "add and norm": _norm, "chain, softmax, chain": _softmax_of_a_chain,
    "two reductions of one input": _two_readers, "product and gelu": _product_and_gelu,
    "gather and add": _gather_and_add, "cat of chains": _joined, "chain and transpose": _turned,
    "running sum and scale": _running_sum,
}  # fmt: skip


def pattern_cases(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    x, w = (torch.randn(*s, device=device, dtype=dtype) for s in ((rows, columns), (columns,)))
    yield from (Case(name, function, (x, w)) for name, function in PATTERNS.items())


def overheads(small: bool, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield what is bound by launches, and what is bound by one product."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))).to(device, dtype)
    net.requires_grad_(False)
    yield Case("eight layers of 64, 8 rows", net, (torch.randn(8, 64, device=device, dtype=dtype),))
    size = 128 if small else 4096
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    yield Case(f"one product of {size}", torch.matmul, (a, b))


class GeneratedCode(NamedTuple):
    """kernels: name → kind. launches: of all kernels. calls: functions of libraries → how often."""

    kernels: dict[str, str]
    launches: int
    calls: dict[str, int]

    @staticmethod
    def read(texts: list[str]) -> GeneratedCode:
        """Read the code that Inductor wrote: Triton kernels are named `triton_KIND_fused_OPS_N`, C++ ones
        `cpp_fused_OPS_N`."""
        kernels, launches, calls = dict[str, str](), 0, dict[str, int]()
        for text in texts:
            for name in re.findall(r"^(\w+) = async_compile\.\w+\(", text, flags=re.MULTILINE):
                kind = re.match(r"triton_(\w{3})_", name)
                kernels[name] = KINDS.get(kind[1], kind[1]) if kind else "C++"
            launches += sum(len(re.findall(rf"^\s+{name}(?:\.run)?\(", text, flags=re.MULTILINE)) for name in kernels)
            for name in re.findall(r"(?:extern_kernels\.|torch\.ops\.(?:aten|mkl|mkldnn)\.)([\w.]+)\(", text):
                calls[name] = calls.get(name, 0) + 1
        return GeneratedCode(kernels, launches, calls)


def compiled(case: Case, mode: str) -> tuple[Callable[..., Tensor], GeneratedCode, float]:
    """Return the function of a mode, the code that was made, and the seconds of its first call."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    made = torch.compile(case.function, mode=None if mode == "default" else mode, dynamic=False)
    began = time.perf_counter()
    _, texts = run_and_get_code(made, *case.inputs)
    _wait(case.inputs[0])
    return made, GeneratedCode.read(texts), time.perf_counter() - began


def error(case: Case, made: Callable[..., Tensor]) -> float:
    """Return the largest difference to torch's result, as a part of its largest number."""
    want = case.function(*case.inputs).double()
    return float((made(*case.inputs).double() - want).abs().max() / want.abs().max())


def milliseconds(case: Case, function: Callable[..., Tensor], runs: int = 7, calls: int = 20) -> float:
    """Return the median of `runs` runs of `calls` calls each, per call."""
    for _ in range(5):
        function(*case.inputs)
    times = []
    for _ in range(runs):
        _wait(case.inputs[0])
        began = time.perf_counter()
        for _ in range(calls):
            function(*case.inputs)
        _wait(case.inputs[0])
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times) / calls


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def captured(case: Case) -> dict[str, Any]:
    """Return what Dynamo says of a case: graphs, breaks, ops, and its guards by kind."""
    torch._dynamo.reset()
    told = torch._dynamo.explain(case.function)(*case.inputs)
    guards = Counter(each.create_fn_name() for each in told.out_guards or ())
    return {
        "graphs": told.graph_count, "breaks": told.graph_break_count, "ops": told.op_count,
        "guards": dict(guards.most_common()),
    }  # fmt: skip


@torch.no_grad()
def lines(cases: list[Case], modes: list[str], until: float) -> Iterator[dict[str, Any]]:
    """Yield a line for each case and mode that is begun before `until` of the clock. Raise AssertionError if a mode
    differs from torch."""
    for case in cases:
        if time.perf_counter() > until:
            return
        common = {"workload": "inductor mode", "case": case.name, "dtype": str(case.inputs[0].dtype)[6:]}
        yield {**common, "mode": "torch", **captured(case), "ms": milliseconds(case, case.function)}
        for mode in modes:
            if time.perf_counter() > until:
                return
            made, code, first = compiled(case, mode)
            off, bound = error(case, made), TOLERANCE[case.inputs[0].dtype]
            assert off <= bound, f"{case.name} in {mode} is off by {off:.1e} of the largest, above {bound:.0e}"
            found = {
                "kernels": code.kernels,
                "launches": code.launches,
                "calls": code.calls,
                "first_s": first,
                "error": off,
            }
            yield {**common, "mode": mode, **found, "ms": milliseconds(case, made)}


def main() -> None:
    a = asked(
        __doc__, modes=([OneOf(MODES)], "of torch.compile"), seconds=(100.0, "after which no case is begun"),
        part=(OneOf(("all", "block", "patterns", "overheads")), "of the cases"), output=(Path, "the file of results"),
        small=(False, "tiny sizes"), tokens=([1, 64, 2048], "of the block"),
    )  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = SMALL if a.small else LLAMA_8B
    torch._inductor.config.force_disable_caches = True
    warnings.simplefilter("ignore")  # one for each compilation, of the caches that are left out
    until = time.perf_counter() + a.seconds
    with told(), torch.no_grad():
        torch.manual_seed(0)
        cases: list[Case] = []
        if a.part in ("all", "block"):
            layer = block(sizes, device, dtype)
            cases += [block_case(layer, sizes, tokens, device, dtype) for tokens in a.tokens]
        if a.part in ("all", "overheads"):
            cases += overheads(a.small, device, dtype)
        if a.part in ("all", "patterns"):
            cases += pattern_cases(*((32, 64) if a.small else (4096, 4096)), device, dtype)
        for line in lines(cases, a.modes, until):
            keep(a.output, line)
            made = f"{len(line['kernels'])} kernels, {sum(line['calls'].values())} calls" if "kernels" in line else ""
            first = f"{line['first_s']:6.1f} s" if "first_s" in line else " " * 8
            print(f"{line['case']:28} {line['mode']:16} {line['ms']:9.4f} ms {first} {made}", flush=True)


if __name__ == "__main__":
    main()
