"""One op through all of torch.compile: a norm that rounds its result to FP8, alone, and between ops that can be fused.

    python -m ridgeline_bench.scripts.captured_op [--tokens 4096] [--width 4096] [--show] [--output FILE.jsonl]
        [--commit HASH]                                                           # one GPU; a CPU shows the layers

`torch.ops.ridgeline.add_rms_norm_fp8` adds a residual, norms, and rounds to E4M3 with a scale for each token. The
function around it gates what comes and scales the sum that goes. It runs in these forms:

    torch        all of it in torch's own ops, eager
    launched     our kernel, launched by our own code, which a compiler cannot look into
    registered   our kernel as a registered op

each eagerly and through the back ends of torch.compile; one that a compiler cannot take has failed. A line has a form
and a back end: graphs and their breaks as Dynamo counts them, kernels of a call on a GPU, the largest difference from
`torch`, and microseconds beside the least, which is bytes over the rate of the device's memory. --show prints the graph
of each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.library import chosen
from ridgeline.kernels.gemm.fp8.library_ops import NORM_FP8, add_rms_norm_fp8, norm_fp8
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN
from ridgeline.worker.machine import hardware_of
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

EPS = 1e-6
Form = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
BACKENDS = {"cuda": ("aot_eager", "inductor"), "cpu": ("aot_eager", "inductor", "ridgeline")}
SAMPLES, CALLS = 15, 20


def plain(x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, scales, s) by torch's ops."""
    return norm_fp8(x_TM, residual_TM, weight_M, EPS, BY_TOKEN)


def launched(x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by our kernel, as an engine launches it."""
    return chosen(NORM_FP8, x_TM)(x_TM, residual_TM, weight_M, EPS, BY_TOKEN)


def registered(x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by the registered op."""
    return add_rms_norm_fp8(x_TM, residual_TM, weight_M, EPS, False)


FORMS: dict[str, Form] = {"torch": plain, "launched": launched, "registered": registered}


def between(form: Form) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function with ops before and behind the form, which a compiler can fuse among themselves."""

    def run(gate_TM: Tensor, up_TM: Tensor, residual_TM: Tensor, weight_M: Tensor) -> tuple[Tensor, ...]:
        q_TM, scale_T, s_TM = form(F.silu(gate_TM) * up_TM, residual_TM, weight_M)
        return q_TM, scale_T * 2, s_TM * 0.5 + 1

    return run


def given(tokens: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return random inputs: bfloat16 on a GPU, float32 on a CPU."""
    draw = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drawn = [torch.randn(tokens, width, generator=draw, device=device).to(dtype) for _ in range(3)]
    return *drawn, torch.randn(width, generator=draw, device=device).to(dtype)


def least(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], bandwidth: float) -> float:
    """Return the microseconds of reading all inputs and writing all outputs once, at a rate in bytes a second."""
    return 1e6 * sum(each.nbytes for each in (*inputs, *outputs)) / bandwidth


def microseconds(run: Callable[[], object]) -> float:
    """Return the time of a call on a GPU, the host's launches included: the median of some samples of many calls."""
    samples = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            run()
        end.record()
        end.synchronize()
        samples.append(1e3 * begin.elapsed_time(end) / CALLS)
    return median(samples)


def kernels(run: Callable[[], object]) -> int:
    """Return how many kernels a call launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(each.device_type == torch.autograd.DeviceType.CUDA for each in seen.events())


def difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest difference of what rounded numbers stand for, and of sums, over the largest number. One step
    of E4M3 is an eighth at most."""
    wide = [(each[0].float() * each[1][:, None], each[2].float()) for each in (found, expected)]
    return max(float((mine - plain).abs().max() / plain.abs().max()) for mine, plain in zip(*wide, strict=True))


def lines_of(inputs: tuple[Tensor, ...], bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield the line of each form and back end."""
    device = inputs[0].device
    on_gpu, expected = device.type == "cuda", between(plain)(*inputs)
    for name, form in FORMS.items():
        run = between(form)
        torch._dynamo.reset()
        explained = torch._dynamo.explain(run)(*inputs)
        reasons = [each.reason.partition("\n")[0][:160] for each in explained.break_reasons]
        for backend in ("eager", *BACKENDS[device.type]):
            torch._dynamo.reset()
            called = run if backend == "eager" else torch.compile(run, backend=backend)
            line = {
                "form": name, "backend": backend, "graphs": explained.graph_count,
                "breaks": explained.graph_break_count, "reasons": reasons,
            }  # fmt: skip
            try:
                found = called(*inputs)
            except Exception as error:  # a compiler that looks into a launch of ours may raise anything
                yield line | {"failed": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
                continue
            line["difference"] = difference(found, expected)
            if on_gpu:
                call = functools.partial(called, *inputs)
                call()
                line |= {
                    "kernels": kernels(call),
                    "us": microseconds(call),
                    "least_us": least(inputs, found, bandwidth),
                }
            yield line


def shown(inputs: tuple[Tensor, ...]) -> str:
    """Return the registered form at each layer: what Dynamo, AOTAutograd and fake tensors make of it."""
    from torch._dynamo.backends.common import aot_autograd

    texts = list[str]()

    def keeps(title: str, graph: Any, _: Any) -> Any:
        values = [
            f"    {node.name}: {tuple(value.shape)} {value.dtype} {type(value).__name__}"
            for node in graph.graph.nodes
            if isinstance(value := node.meta.get("val", node.meta.get("example_value")), Tensor)
        ]
        texts.append("\n".join([title, graph.print_readable(print_output=False), *values]))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(between(registered), backend=functools.partial(keeps, "Dynamo"), fullgraph=True)(*inputs)
    torch._dynamo.reset()
    through = aot_autograd(fw_compiler=functools.partial(keeps, "AOTAutograd, with fake tensors"))
    torch.compile(between(registered), backend=through, fullgraph=True)(*inputs)
    return "\n\n".join(texts)


def main() -> None:
    a = asked(
        __doc__, tokens=4096, width=4096, device="cuda" if torch.cuda.is_available() else "cpu",
        show=(False, "print the graphs"), commit="", output=Path,
    )  # fmt: skip
    with told():
        check_counts(a, "tokens", "width")
    device = torch.device(a.device)
    inputs, hardware = given(a.tokens, a.width, device), hardware_of(device)
    if a.show:
        print(shown(inputs))
    here = asdict(host_with(device, a.commit))
    table = Table("form", "back end", "graphs", "breaks", "kernels", "us", "least", "difference")
    wrong = list[str]()
    for line in lines_of(inputs, hardware.attained().bandwidth if hardware else float("nan")):
        if "failed" in line and line["form"] != "launched":
            wrong.append(f"{line['form']} through {line['backend']} failed: {line['failed']}")
        if not line.get("difference", 0.0) <= 0.125:
            wrong.append(f"{line['form']} through {line['backend']} differs by {line['difference']:g}")
        figures = [f"{line[name]:.1f}" if name in line else "" for name in ("us", "least_us")]
        table.add_row(
            line["form"], line["backend"], str(line["graphs"]), str(line["breaks"]), str(line.get("kernels", "")),
            *figures, line["failed"][:40] if "failed" in line else f"{line['difference']:.2g}",
        )  # fmt: skip
        keep(a.output, {"machine": here, "workload": "captured op", "tokens": a.tokens, "width": a.width, **line})
    Console(width=120).print(table)
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
