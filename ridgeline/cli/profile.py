"""`ridgeline profile`: show where the time and memory of a real run go."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.options import with_ranks, with_records
from ridgeline.cli.peers import PEER, PeerFlags
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.rank_waits import RankWaits
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.engine import Engine
from ridgeline.perf.hardware import FLOORS

if TYPE_CHECKING:
    from ridgeline.llm import LLM
    from ridgeline_bench.profile.ncu import NcuKernel

DESCRIBED = 20  # kernels of Nsight Compute whose figures are shown section by section


@dataclass(frozen=True)
class WorkFlags:
    """The requests of random tokens, where no prompts are given."""

    batch: Annotated[int, typer.Option(help="Requests of random tokens at once.")] = 8
    input_tokens: Annotated[int, typer.Option("--input", help="Prompt tokens of each request.")] = 128
    output_tokens: Annotated[int, typer.Option("--output", help="Output tokens of each request.")] = 32


@dataclass(frozen=True)
class LoadFlags:
    """The way to load the model."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    load_format: Annotated[str, typer.Option(help="auto, safetensors, or dummy (random weights).")] = "auto"


@dataclass(frozen=True)
class BesideFlags(PeerFlags):
    """The peer whose decode steps are shown beside ours."""

    peer: Annotated[str, typer.Option(help=f"{PEER} Its kernels and pauses are shown beside ours.")] = "none"


@dataclass(frozen=True)
class NcuFlags:
    """The kernels that Nsight Compute looks at."""

    ncu: Annotated[bool, typer.Option("--ncu", help="Also run Nsight Compute on one decode step's kernels.")] = False
    ncu_kernels: Annotated[int, typer.Option(help="Kernels Nsight Compute looks at.", min=1)] = 20
    rungs: Annotated[
        list[str] | None,
        typer.Option(help="With --ncu, instead of a model: LADDER:RUNG[:PROBLEM] or op:OP:CASE, one or several."),
    ] = None
    cubins: Annotated[Path | None, typer.Option(help="With --rungs: a folder with the rungs' machine code.")] = None


@with_ranks
@with_records
def profile(
    model: Annotated[str, typer.Argument(help="Model folder or hub id; '' is the embedded model.")] = "",
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts to complete; else random tokens.")
    ] = None,
    *,
    work: WorkFlags,
    out: Annotated[Path, typer.Option(help="Folder for trace.json, flame.svg, steps.svg, memory.json, summary.txt.")],
    load: LoadFlags,
    beside: BesideFlags,
    look: NcuFlags,
    ranks: dict[str, Any],
) -> None:
    """Run a workload under the profilers and write what they saw. On several devices: which rank waited for which."""
    prompts, batch, input_tokens, output_tokens = prompts or [], work.batch, work.input_tokens, work.output_tokens
    for name, value in (("batch", batch), ("input", input_tokens), ("output", output_tokens)):
        if value < 1:
            raise InvalidConfig(f"--{name} is {value}; it must be at least 1.")
    if out.exists() and not out.is_dir():
        raise InvalidConfig(f"--out {out} is a file; name a folder.")
    if look.rungs or look.cubins:
        if not (look.rungs and look.ncu) or model or prompts or beside.peer != "none" or LLMConfig(**ranks).divided_by:
            raise InvalidConfig("--rungs goes with --ncu, and takes the place of a model; leave out all else.")
        _rungs(look, out)
        return
    ncu = look.ncu
    if beside.peer != "none":
        if ncu or prompts or LLMConfig(**ranks).divided_by:
            raise InvalidConfig("--peer compares requests of random tokens on one device; leave out all else.")
        _beside(model, work, out, load, beside)
        return
    from ridgeline.llm import LLM  # torch takes seconds to import; --help and usage errors need not wait
    from ridgeline.ranks.leader import Group
    from ridgeline.worker.machine import hardware_of
    from ridgeline_bench.profile.ncu import run_ncu
    from ridgeline_bench.profile.profile import op_limits, summary
    from ridgeline_bench.profile.profile import profile as measure
    from ridgeline_bench.profile.ranks import traced

    options = asdict(load)
    if LLMConfig(**ranks).divided_by:
        if ncu:
            raise InvalidConfig("--ncu looks at one device; leave out what divides the model.")
        with LLM(model, **options, **ranks, rank_trace_dir=str(out), skip_tokenizer_init=not prompts) as llm:
            run, engine, group = _workload(llm, prompts, work), llm.assembly.engine, llm.assembly.worker
            run()
            text = waits_of(llm.rank_waits())
            assert isinstance(engine, Engine)  # requests are not divided where ranks are traced
            assert isinstance(group, Group)
            text += "\n" + traced(engine, group, run, out)
        (out / "summary.txt").write_text(text)
        print(text, end="")
        print(
            f"written to {out}: summary.txt, and for Perfetto step-*.json, longest-*.json, merged.json", file=sys.stderr
        )
        return
    with LLM(model, **options, skip_tokenizer_init=not prompts, enable_prefix_caching=False) as llm:
        assembly = llm.assembly
        run = _workload(llm, prompts, work)
        hardware = hardware_of(assembly.device)
        limits = op_limits(assembly.model.spec, hardware, assembly.precision) if hardware is not None else None
        assert isinstance(assembly.engine, Engine)  # one device has no other
        floors = FLOORS if hardware is None else hardware.floors
        report = measure(assembly.engine, assembly.local, run, out, limits, floors)
        size = f"{len(prompts)} prompts" if prompts else f"batch {batch}, {input_tokens} tokens in"
        title = f"{model or 'embedded model'}, {assembly.dtype} on {assembly.device}: {size}, {output_tokens} out"
    text = summary(report, title)
    if ncu:
        told, kernels = run_ncu(model, options, batch=batch, context=input_tokens, kernels=look.ncu_kernels)
        text += "\n" + told + _kept(out, [(f"decode step of {title}", kernel) for kernel in kernels])
    (out / "summary.txt").write_text(text)
    print(text, end="")
    print(f"written to {out}: summary.txt, trace.json, flame.svg, steps.svg, stacks.txt, memory.json", file=sys.stderr)


def _rungs(look: NcuFlags, out: Path) -> None:
    """Look at rungs of ladders by Nsight Compute."""
    from ridgeline_bench.named_kernels import of_rungs
    from ridgeline_bench.profile.ncu import table

    found = of_rungs(look.rungs or [], look.cubins)
    text = table([kernel for _, kernel in found]) + _kept(out, found)
    (out / "summary.txt").write_text(text)
    print(text, end="")
    print(f"written to {out}: summary.txt, ncu.jsonl", file=sys.stderr)


def _kept(out: Path, found: Sequence[tuple[str, NcuKernel]]) -> str:
    """Store kernels as lines of `ncu.jsonl`, and return those that took longest in words: one launch of each name."""
    from ridgeline_bench.profile.ncu import described
    from ridgeline_bench.results import append_lines

    out.mkdir(parents=True, exist_ok=True)
    append_lines(out / "ncu.jsonl", [{"kind": "nsight compute", "of": title, **each.line()} for title, each in found])
    longest = sorted(found, key=lambda item: -item[1].figures.get("ns", 0.0))
    named = {(title, kernel.name): kernel for title, kernel in reversed(longest)}
    chosen = sorted(named.items(), key=lambda item: -item[1].figures.get("ns", 0.0))[:DESCRIBED]
    return "".join(f"\n{title}\n{described(kernel)}" for (title, _), kernel in chosen)


def _beside(model: str, work: WorkFlags, out: Path, load: LoadFlags, beside: BesideFlags) -> None:
    """Profile the decode steps of two engines, each in a process of its own."""
    if work.output_tokens < 2:
        raise InvalidConfig(f"--output is {work.output_tokens}; a decode step needs a second token.")
    from ridgeline_bench.profile.beside import DecodeSteps, decode_steps, line, table
    from ridgeline_bench.results import append_lines
    from ridgeline_bench.setup import Peer, Setup

    setup = Setup(model, dtype=load.dtype, device=load.device, dummy=load.load_format == "dummy")
    shape = {"count": work.batch, "input_len": work.input_tokens, "output_len": work.output_tokens}
    sides: list[DecodeSteps] = []
    for folder, outcome in zip(("own", "peer"), setup.traces(Peer(**beside.of_process()), shape, out), strict=False):
        for note in outcome.notes:
            print(f"ridgeline: {note}", file=sys.stderr)
        if outcome.failed:
            raise typer.Exit(1)
        known = outcome.records[0]
        figures = {r.metric: (r.value / 1e3, r.limit / 1e3) for r in outcome.records if r.workload == "decoded"}
        side = decode_steps(
            out / folder, figures, engine=known.engine, version=known.version, steps=work.output_tokens - 1
        )
        # The limit is of the model and the device, and some engines hide both from the process that measures.
        sides.append(side if side.limit or not sides else replace(side, limit=sides[0].limit))
        asked = {"model": known.model, "dtype": known.dtype, "options": {**known.options, **shape}}
        append_lines(out / "profile.jsonl", [{**line(sides[-1]), **asked, "machine": asdict(known.machine)}])
    title = f"{known.model}, {known.dtype}: batch {work.batch}, {work.input_tokens} tokens in, {work.output_tokens} out"
    text = table(sides, title)
    (out / "summary.txt").write_text(text)
    print(text, end="")
    print(f"written to {out}: summary.txt, profile.jsonl, traces in own and peer", file=sys.stderr)


def waits_of(ranks: Sequence[RankWaits]) -> str:
    """Return a table of which ranks waited, and for which others waited."""
    lines = ["rank   steps ms   waited ms   of it   others waited for it ms"]
    lines += [
        f"{each.rank:4} {1e3 * each.steps:10.1f} {1e3 * each.waited:11.1f} {each.waited / (each.steps or 1.0):7.1%} "
        f"{1e3 * each.caused:25.1f}"
        for each in ranks
    ]
    last = max(ranks, key=lambda each: each.caused)
    return "\n".join([*lines, f"rank {last.rank} was waited for the longest", ""])


def _workload(llm: LLM, prompts: list[str], work: WorkFlags) -> Any:
    """Return the run to profile, with the same tokens every time."""
    params = SamplingParams(temperature=0, max_tokens=work.output_tokens, ignore_eos=True)
    if prompts:
        return lambda: llm.generate(prompts, params, use_tqdm=False)
    draw, vocabulary = random.Random(0), llm.assembly.model.spec.vocab_size
    ids = [[draw.randrange(vocabulary) for _ in range(work.input_tokens)] for _ in range(work.batch)]
    return lambda: llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
