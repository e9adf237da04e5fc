"""A decoder that the compiler's partitioner divides over two GPUs of one host: the same scores as on one, and its time
beside the layers' own tensor parallelism, lowered by the same passes and with the same kernels.

    python -m ridgeline_bench.scripts.sharded_decoder --device cuda --output results.jsonl

A GPU's machine without MLIR takes the kernels from a folder that another machine filled (--carry FOLDER, then
--artifacts FOLDER); what is in none runs op by op. Every rank compares first: in float32 the scores of the divided
decoder with those of one device, and in bfloat16 how far both are from float32. Times are of graphs, in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.compiler.artifacts import ArtifactStore, default_store
from ridgeline.compiler.graph import OpGraph
from ridgeline.compiler.program import CompiledProgram
from ridgeline.compiler.sharding.decoders import TracedAxis, divisions, traced_decoder
from ridgeline.compiler.sharding.layout import MeshShape, layout_of, part_of_rank
from ridgeline.compiler.sharding.overlap import overlapped
from ridgeline.compiler.sharding.passes import ShardingSteps, sharded
from ridgeline.compiler.sharding.run import program_of
from ridgeline.compiler.sharding.trace import TracedModule
from ridgeline.compiler.targets import CudaTarget, Target, target_of
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import dense_states
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.processes import join
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.communication.runs import SAFE
from ridgeline_bench.machine.timing import device_seconds
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import OneOf, asked, keep, told

RANKS, AXIS = 2, "tp"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 16, "vocab_size": 320}
CHECKED = 128  # tokens of the check


@dataclass(frozen=True)
class DividedForms:
    """The graphs of one rank: whole for one device, divided by the partitioner (with and without overlap), by hand."""

    traced: TracedModule
    forms: Mapping[str, OpGraph]
    by_hand: TracedModule


def spec_of(folder: Path, layers: int, *, tiny: bool) -> ModelSpec:
    """Return a model's spec with its first layers."""
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps({**config, **(TINY if tiny else {})}))
        spec = read_model_config(Path(place)).spec
    return replace(spec, layers=spec.layers[:layers])


@cache
def forms_of(spec: ModelSpec, rank: int, tokens: int, dtype: torch.dtype) -> DividedForms:
    traced, found = traced_decoder(spec, tokens, dtype=dtype), ShardingSteps()
    sharded(traced, MeshShape(((AXIS, RANKS),)), divisions(spec, RANKS, AXIS), steps=found)
    by_hand = traced_decoder(spec, tokens, dtype=dtype, mesh=Mesh(tp=TracedAxis(rank, RANKS, AXIS)))
    graphs = {"one device": traced.graph, "by hand": by_hand.graph}
    graphs["partitioned"] = found.graphs["minimise"].graph
    graphs["partitioned, overlapped"] = found.graphs["overlap"].graph
    return DividedForms(traced, graphs, by_hand)


class RankWeights:
    """All numbers of a model on a device, made up by name; every rank makes the same ones."""

    def __init__(self, spec: ModelSpec, device: torch.device, tokens: int) -> None:
        self.device = device
        ops = Ops(Platform(device_type="cpu"))
        meta = Decoder(spec, ops, dtype=torch.bfloat16, device=torch.device("meta"), max_positions=tokens)
        self._tensors = {name: self._made(name, each) for name, each in meta.named_parameters()}
        small = replace(spec, layers=spec.layers[:1], vocab_size=8)
        real = Decoder(small, ops, dtype=torch.bfloat16, device=device, max_positions=tokens)
        self._tables = dict(real.named_buffers())
        mesh = MeshShape(((AXIS, RANKS),))
        self._layouts = {
            name: layout_of(text, self._tensors[name.removeprefix("decoder.")].shape, mesh)
            for name, text in divisions(spec, RANKS, AXIS).items()
        }
        self._mesh = mesh

    def _made(self, name: str, like: Tensor) -> Tensor:
        if "norm" in name:
            return torch.ones(like.shape, dtype=like.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(sum(map(ord, name)))
        made = torch.randn(like.shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        return made.mul_(like.shape[-1] ** -0.5)

    def inputs(self, traced: TracedModule, rank: int | None, dtype: torch.dtype, given: Sequence[Tensor]) -> list[Any]:
        """Return the inputs of a graph: whole, or a rank's parts."""
        found: list[Any] = []
        for name, value in zip(traced.names, traced.graph.inputs, strict=True):
            if name.startswith("input "):
                found.append(given[int(name.split()[1])])
                continue
            own = name.removeprefix("decoder.")
            tensor = self._tensors[own] if own in self._tensors else self._tables[own][: value.tensor.shape[0]]
            layout = self._layouts.get(name) if rank is not None else None
            if layout is not None and rank is not None:
                tensor = part_of_rank(tensor, layout, rank, self._mesh)
            found.append(tensor.to(value.tensor.dtype) if tensor.is_floating_point() else tensor)
        return found

    def fill(self, decoder: Decoder, rank: int) -> None:
        """Fill a rank's decoder with its parts."""
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                layout = self._layouts.get(f"decoder.{name}", None)
                tensor = self._tensors[name]
                parameter.copy_(tensor if layout is None else part_of_rank(tensor, layout, rank, self._mesh))


def checked(weights: RankWeights, spec: ModelSpec, axes: Mapping[str, Axis], target: Target) -> dict[str, float]:
    """Return how far scores are apart, in parts of the largest score. Raise SystemExit if it is more than rounding."""
    rank, device = axes[AXIS].rank, weights.device
    given = tokens_of(spec, CHECKED, device)
    scores: dict[tuple[str, torch.dtype], Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        made = forms_of(spec, rank, CHECKED, dtype)
        for name, graph in made.forms.items():
            alone = name == "one device"
            traced = made.by_hand if name == "by hand" else made.traced
            program = program_of(graph, axes, target)
            [scores[name, dtype]] = program(*weights.inputs(traced, None if alone else rank, dtype, given))
    want = scores["one device", torch.float32]
    largest = float(want.abs().max())
    apart = {
        f"{name}, {str(dtype).removeprefix('torch.')}": float((got.float() - want).abs().max()) / largest
        for (name, dtype), got in scores.items()
    }
    rounding = apart["one device, bfloat16"]
    bounds = {name: 2e-5 if name.endswith("float32") else 2 * rounding for name in apart}
    wrong = {name: value for name, value in apart.items() if not value <= bounds[name]}
    if wrong or not 0 < rounding < 0.1:
        raise SystemExit(f"rank {rank}: scores are apart by {wrong or apart} of the largest, which is {largest:.3g}")
    return apart


def tokens_of(spec: ModelSpec, count: int, device: torch.device) -> list[Tensor]:
    ids = torch.randint(spec.vocab_size, (count,), generator=torch.Generator().manual_seed(7))
    return [ids.to(device), torch.arange(count, device=device)]


def measured(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call, in turns: on a GPU of a graph of it, behind another that lets ranks meet."""
    if device.type == "cpu":
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
        return times
    graphs = {}
    stream = torch.cuda.Stream(device)
    for name, call in calls.items():
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.synchronize(device)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            graph.replay()
            found[name].append(device_seconds(graph.replay))
    return found


def engine_layers(weights: RankWeights, spec: ModelSpec, axis: Axis, tokens: int) -> Callable[[], object]:
    """Return a call of the layers as the engine runs them, with its own kernels, over whole sequences."""
    device = weights.device
    ops = Ops(Platform.of(device))
    decoder = Decoder(spec, ops, dtype=torch.bfloat16, device=device, max_positions=tokens, mesh=Mesh(tp=axis))
    weights.fill(decoder, axis.rank)
    decoder.prepare()
    ids, at = tokens_of(spec, tokens, device)

    def call() -> object:
        with torch.inference_mode():
            return decoder.logits(decoder(ids, at, dense_states(decoder.spec, 1, tokens, torch.bfloat16, device)))

    return call


def rank(number: int, a: Any) -> None:
    device = torch.device(a.device, number) if a.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    axis = join(number, RANKS, Path(a.meeting), device, 60, adds_up=False)
    axes: dict[str, Axis] = {AXIS: axis}
    spec = spec_of(a.model, a.layers, tiny=a.tiny)
    store = ArtifactStore([*default_store().folders, *([a.artifacts] if a.artifacts else [])])
    target = target_of(device, store)
    if target is None:
        raise InvalidConfig(f"there is no target for {device}.")
    weights = RankWeights(spec, device, max(*a.tokens, CHECKED))
    apart = checked(weights, spec, axes, target)
    if number == 0:
        print("apart: " + ", ".join(f"{name} {value:.1e}" for name, value in apart.items()), flush=True)
    record = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    for tokens in a.tokens if not a.check else []:
        made, given = forms_of(spec, number, tokens, torch.bfloat16), tokens_of(spec, tokens, device)
        calls: dict[str, Callable[[], object]] = {}
        programs: dict[str, CompiledProgram] = {}
        for name, graph in made.forms.items():
            traced = made.by_hand if name == "by hand" else made.traced
            programs[name] = program_of(graph, axes, target)
            inputs = weights.inputs(traced, None if name == "one device" else number, torch.bfloat16, given)
            calls[name] = _called(programs[name], inputs)
        if a.engine:
            calls["engine's layers"] = engine_layers(weights, spec, axis, tokens)
        times = measured(calls, device, a.rounds)
        medians = torch.tensor([statistics.median(each) for each in times.values()], dtype=torch.float32, device=device)
        slower = axis.gather_rows(medians[None]).amax(0).tolist()
        if number:
            continue
        own = [each for each, _ in overlapped(made.forms["partitioned, overlapped"])]
        for name, seconds in zip(times, slower, strict=True):
            program = programs.get(name)
            kernels = None if program is None else program.num_kernels
            fallbacks = None if program is None else len(program.fallbacks)
            print(f"{tokens:6} tokens  {name:26} {1e3 * seconds:8.3f} ms  kernels {kernels}, op by op {fallbacks}")
            keep(
                a.output,
                {
                    **record,
                    "machine": asdict(host_with(device, a.commit)),
                    "workload": "sharded decoder",
                    "model": {"name": a.model.name, "layers": a.layers, "width": spec.hidden_size},
                    "tokens": tokens,
                    "ranks": RANKS,
                    "way": name,
                    "median": seconds,
                    "unit": "s",
                    "samples": times[name],
                    "kernels": kernels,
                    "op by op": fallbacks,
                    "overlapped": len(own) if "overlapped" in name else None,
                    "apart": apart,
                },
            )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # captured graphs hold communicators, whose destruction may wait for the other rank


def _called(program: CompiledProgram, inputs: Sequence[Any]) -> Callable[[], object]:
    return lambda: program(*inputs)


def carry(folder: Path, target: str, spec: ModelSpec, tokens: Sequence[int]) -> int:
    """Compile the kernels of all ranks' graphs into a folder, and return the number that it has."""
    made = CudaTarget(target, ArtifactStore([folder]))
    asked_for = {(CHECKED, torch.float32), (CHECKED, torch.bfloat16), *((each, torch.bfloat16) for each in tokens)}
    for count, dtype in sorted(asked_for, key=str):
        for each in range(RANKS):
            for name, graph in forms_of(spec, each, count, dtype).forms.items():
                program = program_of(graph, {AXIS: ALONE}, made)
                for why in program.fallbacks:
                    print(name, count, dtype, why)
    return len(list(folder.glob("*.kernel")))


def main() -> None:
    a = asked(
        __doc__,
        model=(Path("benchmarks/models/llama-8b"), "folder of a config.json"),
        layers=(4, "how many of its layers"),
        tiny=(False, "narrow layers, to try the script"),
        tokens=[128, 2048],
        rounds=(15, "replays of each way"),
        device=(OneOf(("cpu", "cuda")), "where to run"),
        artifacts=(Path, "a folder with kernels"),
        carry=(Path, "fill this folder with kernels for the target, and measure nothing"),
        target=("sm_90", "for which to fill it"),
        engine=(False, "also the layers with the engine's kernels"),
        check=(False, "compare and measure nothing"),
        commit=("", "the commit that is measured, where there is no git"),
        output=(Path, "the file of results"),
        rank=(-1, "of a process that this command starts"),
        meeting="",
    )
    with told():
        if a.carry:
            count = carry(a.carry, a.target, spec_of(a.model, a.layers, tiny=a.tiny), a.tokens)
            print(f"{count} kernels in {a.carry}")
            return
        if a.rank >= 0:
            with torch.no_grad():
                rank(a.rank, a)
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        command = [sys.executable, "-m", "ridgeline_bench.scripts.sharded_decoder", *sys.argv[1:], "--meeting", meeting]
        running = [
            subprocess.Popen([*command, "--rank", str(each)], env={**os.environ, **SAFE}) for each in range(RANKS)
        ]
        sys.exit(int(any(process.wait() for process in running)))


if __name__ == "__main__":
    main()
