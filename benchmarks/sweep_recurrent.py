"""The gated delta rule, its convolution and its norm on a GPU: check every implementation, then time it.

    python -m benchmarks.sweep_recurrent --out results.jsonl [--only prefill] [--plans all]

Shapes are those of a Qwen3-Next layer: 16 key heads, 32 value heads, keys and values of 128, a convolution over 8192
channels. "2/8" is 2 key heads and 8 value heads instead, an eighth of a larger model's layer. Prefills run the plan
that is chosen; with `--plans all` they run every plan of PLANS, and with `--plans hopper` those of hopper_chunks.py,
each checked against the recurrence before it is timed.

Launches take several inputs and states in turn, so that nothing is found in the second-level cache, and run in a
captured graph. A limit is the larger of bytes / 4.42 TB/s and FLOPs / 750 TFLOP/s of the op's least work. Where the
kernels of flash-linear-attention can be imported, as its own package or as vLLM has them, they are compared and timed
in the same run; what they take as ready, decays and strengths, is not in their time. A case that fails prints a line.
`--dry` runs the script itself with small shapes on a CPU, and times nothing.

Legend: see kernels/gated_delta/op.py
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor

from benchmarks.sweeping import UNCACHED  # with --dry it lets Triton interpret, before Triton is imported
from ridgeline.core.cost import Cost
from ridgeline.kernels.causal_conv import cases as conv_cases
from ridgeline.kernels.causal_conv import op as conv
from ridgeline.kernels.causal_conv import triton as conv_triton
from ridgeline.kernels.causal_conv.cases import ConvCase
from ridgeline.kernels.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.gated_delta import op as delta
from ridgeline.kernels.gated_delta import triton as delta_triton
from ridgeline.kernels.gated_delta import triton_step
from ridgeline.kernels.gated_delta.cases import GATED_CASES, DeltaCase
from ridgeline.kernels.gated_delta.cost import gated_delta_cost
from ridgeline.kernels.gated_delta.plan import Plan
from ridgeline.kernels.gated_norm import cases as norm_cases
from ridgeline.kernels.gated_norm import op as norm
from ridgeline.kernels.gated_norm.cases import GatedNormCase
from ridgeline.kernels.gated_norm.cost import gated_norm_cost
from ridgeline.kernels.op import Op, Platform
from ridgeline.kernels.turns import Turns

BYTES, FLOPS = 4.42e12, 750e12  # per second
DRY = "--dry" in sys.argv
LAYER = DeltaCase((1,), heads=16, value_heads=32, key_width=128, value_width=128)
CHANNELS = 8192
DECODES = (256, 64, 8, 1)
PREFILLS: dict[str, tuple[int, ...]] = {
    "1k": (1024,),
    "8k": (8192,),
    "64k": (65_536,),
    "16 of 512": (512,) * 16,
    "mixed": (4096, 777, 2048, *[1] * 64),
    "8k, 64 of 1": (8192, *[1] * 64),
    "8k 2/8": (8192,),
    "64k 2/8": (65_536,),
}
DTYPE = torch.float16 if DRY else torch.bfloat16
if DRY:
    LAYER, CHANNELS, DECODES = replace(LAYER, heads=1, value_heads=2, key_width=16, value_width=16), 64, (2, 1)
    PREFILLS = {"1k": (70,), "mixed": (66, 1, 3)}
STEP_CUTS = [triton_step.Cut(*cut) for cut in ((32, 4), (32, 2), (16, 2), (16, 1), (64, 8), (64, 4), (128, 8))]
ENGINE = Plan(64, 4, 3, hopper=True)
PLANS: dict[str, Plan] = {
    "triton 64/4/3": Plan(64, 4, 3),
    "triton 64/4/3, whole inverse": Plan(64, 4, 3, block=2),
    "triton 64/4/3, halves inverse": Plan(64, 4, 3, block=32),
    "triton 64/4/3, 4 a processor": Plan(64, 4, 3, registers=128),
    "triton 64/4/3, no limit": Plan(64, 4, 3, registers=0),
    "triton 64/4/3, 8 warps prepare": Plan(64, 4, 3, prepare_warps=8, registers=128),
    "hopper 64": ENGINE,
    "hopper 128": ENGINE._replace(columns=128),
    "hopper 128, heads together": ENGINE._replace(columns=128, share=2),
    "hopper 64, parts 1024": ENGINE._replace(part=1024),
    "hopper 64, parts 2048": ENGINE._replace(part=2048),
    "hopper 64, parts 4096": ENGINE._replace(part=4096),
    "hopper 64, parts 2048, heads together": ENGINE._replace(part=2048, share=2),
    "hopper 64, segments 1024": ENGINE._replace(segment=1024, carry_columns=128),
    "hopper 64, segments 8192": ENGINE._replace(segment=8192, carry_columns=128),
    "hopper 128, segments 4096": ENGINE._replace(columns=128, segment=4096),
    "hopper 128, segments 4096, heads together": ENGINE._replace(columns=128, segment=4096, share=2),
}
CONV_CUTS = [conv_triton.Cut(*cut) for cut in ((1024, 4, 32, 8), (1024, 4, 32, 4), (1024, 4, 64, 8), (512, 2, 32, 8))]


@dataclass
class Sweep:
    """Prints a table, and writes a line of JSON for each case.

    plans: a word of --plans.
    rows: the prompts that are timed; empty: all.
    """

    device: torch.device
    out: Any
    until: float
    machine: dict[str, str]
    plans: str = "chosen"
    rows: list[str] = field(default_factory=list)
    failed: int = field(default=0)
    checked: set[Any] = field(default_factory=set)
    exact: dict[Any, Any] = field(default_factory=dict)

    def note(self, **fields: Any) -> None:
        self.out.write(json.dumps(self.machine | fields) + "\n")
        self.out.flush()

    def attempt(self, what: str, run: Callable[..., Any], *arguments: Any) -> None:
        """Run a case, unless there is no time left. A failure is a line of the table."""
        if time.monotonic() > self.until:
            print(f"{what}: left out, the time is over")
            return
        try:
            run(*arguments)
        except Exception as error:
            self.failed += 1
            print(f"{what}: FAILED {type(error).__name__}: {str(error).strip()[:300]}")
            self.note(case=what, error=traceback.format_exc()[-1500:])
            synchronize()

    def timed(self, what: str, name: str, calls: list[Callable[[], Any]], cost: Cost) -> None:
        least = max(cost.bytes / BYTES, cost.flops / FLOPS)
        took, captured = seconds(calls, least)
        print(
            f"{what:24} {name:34} {1e6 * took:9.1f} us   limit {1e6 * least:8.1f}   {100 * least / took:5.1f} %"
            f"{'' if captured else '   (not captured)'}",
            flush=True,
        )
        self.note(case=what, name=name, us=1e6 * took, limit_us=1e6 * least, bytes=cost.bytes, flops=cost.flops)


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def seconds(calls: list[Callable[[], Any]], least: float) -> tuple[float, bool]:
    """Return the seconds of one call, the best of three, and whether it ran in a graph."""
    for call in calls[:2]:
        call()
    if DRY:
        return 1.0, True
    torch.cuda.synchronize()
    launches = [calls[i % len(calls)] for i in range(max(len(calls), min(64, round(1e-3 / least))))]

    def once() -> None:
        for call in launches:
            call()

    captured, replay = True, once
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        replay = graph.replay
    except Exception:
        captured = False
        torch.cuda.synchronize()
    best, begin, end = float("inf"), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    for _ in range(3):
        begin.record()
        replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best / len(launches), captured


def close(ours: Tensor, theirs: Tensor, slack: float) -> float:
    """Return the largest difference. Raise AssertionError if it is more than `slack` for numbers of order one."""
    ours, theirs = ours.double(), theirs.double()
    assert torch.equal(ours.isnan(), theirs.isnan()), "NaN in other places"
    error = ((ours - theirs).abs() / (1 + theirs.abs())).nan_to_num(0)
    worst = float(error.max()) if error.numel() else 0.0
    assert worst < slack, f"error {worst:.2e}, {100 * float((error >= slack).double().mean()):.2f} % beyond {slack:.1e}"
    return worst


def ran(run: Callable[..., Tensor], inputs: tuple[Any, Tensor, Turns]) -> tuple[Tensor, Tensor]:
    """Return the outputs of the rows' tokens, and the states after them, without the null block."""
    given, before, turns = inputs
    states = before.clone()
    out = run(given, states, turns)
    return out[: int(turns.start_R1[-1])], states[1:]


def check(sweep: Sweep) -> None:
    """Compare every implementation with the reference, and two launches of it."""
    here = Platform.of(sweep.device)
    wide = replace(LAYER, rows=(200, 1, 0, 65, 3), marks=(64, 1, 0, 30, 0), fresh=(0, 3), heads=2, value_heads=4)
    alike = replace(LAYER, rows=(512,), heads=1, value_heads=2, alike=0.98)
    subjects: list[tuple[Op[Any], Any]] = [(conv.CAUSAL_CONV, case) for case in conv_cases.CASES]
    subjects += [(delta.GATED_DELTA, case) for case in (GATED_CASES[:3] if DRY else (*GATED_CASES, wide, alike))]
    for op, case in subjects:
        inputs = case.inputs(DTYPE, sweep.device)
        wanted = ran(op.reference, inputs)
        for name in [implementation.name for implementation in op.implementations]:
            sweep.attempt(f"check {op.name} {name} {case}", check_one, sweep, op, name, inputs, wanted)
    for case in norm_cases.CASES:
        inputs = case.inputs(DTYPE, sweep.device)
        for implementation in norm.GATED_NORM.implementations:
            got = norm.GATED_NORM.choose(here, implementation.name)(*inputs)
            sweep.attempt(f"check gated_norm {implementation.name} {case}", close, got, norm.gated_norm(*inputs), 0.02)


def check_one(sweep: Sweep, op: Op[Any], name: str, inputs: tuple[Any, ...], wanted: tuple[Tensor, Tensor]) -> None:
    run = op.choose(Platform.of(sweep.device), name)
    first, second = ran(run, inputs), ran(run, inputs)
    errors = [close(got, want, 0.03) for got, want in zip(first, wanted, strict=True)]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)), "two launches differ"
    sweep.note(case=f"check {op.name}", name=name, rows=str(inputs[2].start_R1.tolist()), errors=errors)


def check_bits(sweep: Sweep) -> None:
    """A row cut into steps in any way has the same bits, where an implementation promises it."""
    here, tokens = Platform.of(sweep.device), 9 if DRY else 130
    for op, case, name in (
        (conv.CAUSAL_CONV, ConvCase((tokens,), CHANNELS), "triton"),
        (delta.GATED_DELTA, replace(LAYER, rows=(tokens,)), "batch_invariant"),
    ):
        run, whole = op.choose(here, name), case.inputs(DTYPE, sweep.device)
        given, before, turns = whole
        wanted = ran(run, whole)
        for chunk in (1, 2, 7, 64, 100):
            states, outs = before.clone(), []
            for start in range(0, tokens, chunk):
                end = min(tokens, start + chunk)
                now = replace(
                    turns, start_R1=torch.tensor([0, end - start], dtype=torch.int32, device=sweep.device),
                    num_tokens=end - start, tokens_each=end - start, _chunks={},
                )  # fmt: skip
                outs.append(run(given.at(slice(start, end)), states, now))
            assert torch.equal(torch.cat(outs), wanted[0]), f"{op.name}: chunks of {chunk} give other bits"
            assert torch.equal(states[1:], wanted[1]), f"{op.name}: chunks of {chunk} leave other bits"


def layers(sweep: Sweep, case: DeltaCase) -> list[tuple[Any, ...]]:
    """Return so many inputs of one case that they do not fit into the cache."""
    number = 2 if DRY else max(1, min(64, round(UNCACHED / cost_of(case).bytes)))
    return [case.inputs(DTYPE, sweep.device, seed) for seed in range(number)]


def cost_of(case: DeltaCase) -> Cost:
    return gated_delta_cost(
        case.rows, heads=case.heads, value_heads=case.value_heads, key_width=case.key_width,
        value_width=case.value_width, itemsize=2,
    )  # fmt: skip


def time_steps(sweep: Sweep) -> None:
    for rows in DECODES:
        case, what = replace(LAYER, rows=(1,) * rows), f"step {rows}"
        inputs = layers(sweep, case)
        for cut in STEP_CUTS:
            calls = [partial(delta_triton.gated_delta, *x, step_cut=cut) for x in inputs]
            name = f"triton {cut.columns} columns, {cut.warps} warps"
            sweep.attempt(what, sweep.timed, what, name, calls, cost_of(case))
        time_peers(sweep, what, case, inputs, "fused_recurrent_gated_delta_rule")


def time_prefills(sweep: Sweep) -> None:
    for name, rows in PREFILLS.items():
        if sweep.rows and name not in sweep.rows:
            continue
        narrow = {"heads": 2, "value_heads": 8} if name.endswith("2/8") else {}
        case, what = replace(LAYER, rows=rows, **narrow), f"prefill {name}"
        inputs = layers(sweep, case)
        plans: dict[str, Plan | None] = {"chosen": None}
        plans |= {key: plan for key, plan in swept(sweep).items() if wanted(key, bool(narrow), max(rows))}
        unused = case.inputs(DTYPE, sweep.device, seed=99)  # timing changes states
        first = ran(partial(delta_triton.gated_delta, plan=PLANS["triton 64/4/3"]), unused)
        for key, plan in plans.items():
            if DRY and plan is not None and plan.hopper:
                continue
            calls = [partial(delta_triton.gated_delta, *x, plan=plan) for x in inputs]
            sweep.attempt(f"{what} {key}", check_plan, sweep, plan)
            sweep.attempt(f"{what} {key}", check_prefill, plan, unused, first)
            sweep.attempt(f"{what} {key}", sweep.timed, what, key, calls, cost_of(case))
        sweep.attempt(what, kernels, sweep, name, partial(delta_triton.gated_delta, *inputs[0]))
        time_peers(sweep, what, case, inputs, "chunk_gated_delta_rule")


def wanted(plan: str, narrow: bool, longest: int) -> bool:
    """Return True if a plan is worth its compilation: with few heads only what differs in the chunks' kernel."""
    here = max(PLANS[plan].segment, PLANS[plan].part) < longest
    return here and (not narrow or plan.startswith("hopper") or plan == "triton 64/4/3")


def swept(sweep: Sweep) -> dict[str, Plan]:
    """Return the plans that are timed beside the chosen one."""
    if sweep.plans == "chosen":
        return {}
    return {k: plan for k, plan in PLANS.items() if sweep.plans == "all" or plan.hopper}


def check_prefill(plan: Plan | None, inputs: Any, first: tuple[Tensor, Tensor]) -> None:
    """Compare a plan with the plainest one at the size that is timed."""
    for got, want in zip(ran(partial(delta_triton.gated_delta, plan=plan), inputs), first, strict=True):
        close(got, want, 0.03)


def warm(plan: Plan | None, narrow: bool) -> None:
    """Run a plan once, in a process of its own, so that others find its kernels compiled."""
    heads = {"heads": 2, "value_heads": 8} if narrow else {}
    rows = (max(plan.segment, 2 * plan.part) + 130 if plan else 130, 1, 70)
    with torch.inference_mode():
        inputs = replace(LAYER, rows=rows, **heads).inputs(DTYPE, torch.device("cuda"))
        delta_triton.gated_delta(*inputs, plan=plan)
        torch.cuda.synchronize()


def warm_all(keys: list[str]) -> None:
    """Compile the plans' kernels by several processes. What fails here fails again, with its line, where it is used."""
    tasks = [(PLANS[key], False) for key in keys]
    tasks += [(PLANS[key], True) for key in keys if wanted(key, True, 1 << 20)]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(warm, *task) for task in tasks]:
            future.exception()


def check_plan(sweep: Sweep, plan: Plan | None) -> None:
    """Compare a plan with the recurrence, once: rows with marks and without, keys alike and not. Two launches of it
    must agree."""
    if plan in sweep.checked:
        return
    for case in plan_cases(plan):
        inputs = case.inputs(DTYPE, sweep.device)
        small = plan._replace(part=min(plan.part, 256)) if plan else None  # of the last case there are parts then
        run = partial(delta_triton.gated_delta, plan=small)
        if case not in sweep.exact:
            sweep.exact[case] = ran(delta.delta_rule, inputs)
        first, second = ran(run, inputs), ran(run, inputs)
        errors = [close(got, want, 0.03) for got, want in zip(first, sweep.exact[case], strict=True)]
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)), "two launches differ"
        sweep.note(case=f"check plan {plan}", rows=str(case.rows), errors=errors)
    sweep.checked.add(plan)


def plan_cases(plan: Plan | None) -> list[DeltaCase]:
    cases = [  # with the heads that are timed: a kernel is compiled for these
        replace(LAYER, rows=(200, 1, 0, 65, 3), marks=(64, 1, 0, 30, 0), fresh=(0, 3)),
        replace(LAYER, rows=(70 if DRY else 512,), alike=0.98),
    ]
    if plan is None or plan.segment or plan.part:  # more than one segment or part, and a mark behind the first
        least = plan.segment or 512 if plan else 512
        cases.append(replace(LAYER, rows=(least + 200, 70), marks=(least + 100, 0)))
    return cases[:1] if DRY else cases


def kernels(sweep: Sweep, name: str, run: Callable[[], Any]) -> None:
    """Print how long each kernel of a call takes."""
    run()
    if DRY:
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    times = {e.key: e.self_device_time_total / e.count for e in profile.key_averages() if e.self_device_time_total}
    ours = {key: round(us, 1) for key, us in times.items() if key.startswith("_")}
    print(f"  kernels of {name}, us: {ours}")
    sweep.note(case=f"kernels of {name}", us=ours)


def time_peers(sweep: Sweep, what: str, case: DeltaCase, inputs: list[Any], function: str) -> None:
    for source in (
        "fla.ops.gated_delta_rule",
        "vllm.third_party.flash_linear_attention.ops",
        "vllm.model_executor.layers.fla.ops",
    ):
        try:
            peer = getattr(importlib.import_module(source), function)
        except Exception as error:
            if what in ("step 256", "prefill 1k"):
                print(f"{what}: no {source}.{function}: {type(error).__name__}: {str(error)[:100]}")
            continue
        name = source.partition(".")[0]
        sweep.attempt(f"{what} {name}", time_peer, sweep, what, case, inputs, peer, name)


def time_peer(sweep: Sweep, what: str, case: DeltaCase, inputs: list[Any], peer: Any, name: str) -> None:
    """Compare a peer's outputs with ours, and time it. Its states may lie as [V, K].

    All calls share the tensor of the rows' starts, by whose identity flash-linear-attention keeps what it makes of
    them: made anew while a graph is captured, it would lie in memory that is given back when the capture fails.
    """
    ours, start_R1 = ran(delta_triton.gated_delta, inputs[0])[0], inputs[0][2].start_R1.long()
    calls: list[Callable[[], Any]] = []
    for turned in (False, True):
        calls = [peer_call(peer, x, start_R1, turned) for x in inputs]
        out = calls[0]()[0]
        error = float((out.reshape(ours.shape).double() - ours.double()).abs().max())
        if error < 0.03 * float(1 + ours.double().abs().max()):
            break
    else:
        raise AssertionError(f"its outputs differ by {error:.3f}")
    calls = [peer_call(peer, x, start_R1, turned) for x in inputs]
    sweep.timed(what, f"{name}{' [V, K]' if turned else ''}, off by {error:.1e}", calls, cost_of(case))


def peer_call(peer: Any, x: tuple[Any, ...], start_R1: Tensor, turned: bool) -> Callable[[], Any]:
    given, states_NGKV, turns = x
    q_THK, k_THK, v_TGV, _, b_TG = given.by_token.values()
    g_TG = given.log_decay_TGJ(torch.float32).squeeze(-1)
    steps = "recurrent" in peer.__name__
    states = states_NGKV if steps else states_NGKV[turns.reads_R]
    states = states.transpose(-1, -2).contiguous() if turned else states.clone()
    wanted = {
        "q": q_THK.contiguous()[None], "k": k_THK.contiguous()[None], "v": v_TGV.contiguous()[None], "g": g_TG[None],
        "beta": b_TG.float().sigmoid()[None] if steps else b_TG.sigmoid()[None], "scale": given.scale,
        "initial_state": states, "output_final_state": True, "cu_seqlens": start_R1,
        "ssm_state_indices": turns.reads_R.int(), "inplace_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    known = inspect.signature(peer).parameters
    named = {key: value for key, value in wanted.items() if key in known}
    if "ssm_state_indices" not in known:
        named["initial_state"] = states[turns.reads_R] if steps else states
    return lambda: peer(**named)


def time_small(sweep: Sweep) -> None:
    """Time the convolution and the norm."""
    run = conv.CAUSAL_CONV.choose(Platform.of(sweep.device))
    prefills = {k: v for k, v in PREFILLS.items() if "64k" not in k and "2/8" not in k}
    for name, rows in ({f"{n}": (1,) * n for n in DECODES} | prefills).items():
        case = ConvCase(rows, CHANNELS)
        cost = causal_conv_cost(sum(rows), len(rows), CHANNELS, 4, itemsize=2)
        number = 2 if DRY else max(1, min(64, round(UNCACHED / cost.bytes)))
        inputs = [case.inputs(DTYPE, sweep.device, seed) for seed in range(number)]
        sweep.attempt("conv", sweep.timed, f"conv {name}", "triton", [partial(run, *x) for x in inputs], cost)
        for cut in CONV_CUTS if sweep.plans == "all" and name in prefills else ():
            calls = [partial(conv_triton.causal_conv, *x, cut=cut) for x in inputs]
            sweep.attempt("conv", sweep.timed, f"conv {name}", f"triton {'/'.join(map(str, cut))}", calls, cost)
    run = norm.GATED_NORM.choose(Platform.of(sweep.device))
    for tokens in (1, 8) if DRY else (1, 64, 256, 8192):
        case = GatedNormCase(tokens, 128, 128, heads=32)
        cost = gated_norm_cost(tokens * 32, 128, itemsize=2)
        number = 2 if DRY else max(1, min(64, round(UNCACHED / cost.bytes)))
        inputs = [case.inputs(DTYPE, sweep.device, seed) for seed in range(number)]
        sweep.attempt("norm", sweep.timed, f"norm {tokens}", "triton", [partial(run, *x) for x in inputs], cost)


PARTS = {"check": check, "bits": check_bits, "prefill": time_prefills, "step": time_steps, "small": time_small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=95, help="Cases that begin later are left out.")
    parser.add_argument("--rows", action="append", choices=PREFILLS, help="prompts to time; default: all")
    parser.add_argument("--plans", choices=("chosen", "hopper", "all"), default="chosen")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if DRY else "cuda")
    machine = {
        "device": "dry" if DRY else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "python": platform.python_version(),
    }
    print(machine)
    started = time.monotonic()
    with options.out.open("a") as out, torch.inference_mode():
        sweep = Sweep(device, out, started + options.seconds, machine, options.plans, options.rows or [])
        if sweep.plans != "chosen" and not DRY and (not options.only or "prefill" in options.only):
            sweep.attempt("warm", warm_all, list(swept(sweep)))
            print(f"  warm: {time.monotonic() - started:.1f} s", flush=True)
        for name, run in PARTS.items():
            if not options.only or name in options.only:
                before = time.monotonic()
                sweep.attempt(name, run, sweep)
                print(f"  {name}: {time.monotonic() - before:.1f} s", flush=True)
        print(f"{sweep.failed} failed, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
