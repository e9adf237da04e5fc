"""Compilers at work before the first token: a decoder of ours by torch.compile, ahead of time, and by our own compiler.

    python -m ridgeline_bench.scripts.stack.starts [--layers 32] [--ways inductor aot] [--output results.jsonl]

Each way runs in a process of its own, twice: cold, with empty caches on disk, then warm, with what the first left. Its
scores must be those of the decoder as torch runs it. Ways:

    torch           no compiler
    inductor        torch.compile
    dynamo          torch.compile(backend="ridgeline")
    specs           ridgeline.compiler.decoder: one program for each kind of layer
    aot             torch.export and AOTInductor: the first process writes a package, the second loads it

A line has the seconds from the decoder to the first scores (of `aot` in the second process: of loading the package), by
the clock and of processors, with those of compilers that ran as processes of their own; the milliseconds of later
calls; and what parts took where that is known. On a machine with other work the clock says more than a compiler took.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.compiler.decoder import LayerPrograms, compile_layers
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.models import model_config
from ridgeline.weights.loader import fill_dummy
from ridgeline_bench.scripts.asked import OneOf, asked, check_counts, keep, told
from ridgeline_bench.scripts.onnx_network import TORCH_OPS

WAYS = ("torch", "inductor", "dynamo", "specs", "aot")


class WholeScores(nn.Module):
    """A decoder's scores of one sequence, from its beginning."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.decoder.logits(self.decoder(ids_T, positions_T, DenseCausal(1)))


def spec_of(layers: int, width: int) -> ModelSpec:
    """Return a Llama of this many equal layers."""
    return model_config({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": width,
        "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
        "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False,
    }).spec  # fmt: skip


def scores_of(spec: ModelSpec) -> WholeScores:
    ops = Ops(Platform(device_type="cpu"), TORCH_OPS)
    decoder = Decoder(spec, ops, dtype=torch.float32, device=torch.device("cpu"), max_positions=256)
    fill_dummy(decoder, 0)
    return WholeScores(decoder.requires_grad_(False)).eval()


def made(
    way: str, scores: WholeScores, inputs: tuple[Tensor, Tensor], package: Path
) -> tuple[Callable[..., Tensor], Any]:
    """Return the function of a way, and a function that returns what its parts took."""
    if way == "specs":
        programs = LayerPrograms()
        compile_layers(scores.decoder, programs)
        return scores, lambda: _of_programs(programs, scores.decoder.spec, inputs)
    if way == "dynamo":
        return torch.compile(scores, backend="ridgeline", dynamic=False), _dynamo_times
    if way == "inductor":
        return torch.compile(scores, dynamic=False), _dynamo_times
    if way == "aot":
        if not package.exists():
            exported = torch.export.export(scores, inputs, strict=False)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
        return torch._inductor.aoti_load_package(str(package)), dict
    return scores, dict


def _of_programs(programs: LayerPrograms, spec: ModelSpec, inputs: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return what the programs took, and the seconds of a second decoder's first call in this process."""
    again = scores_of(spec)
    compile_layers(again.decoder, programs)
    began = time.perf_counter()
    again(*inputs)
    return {
        "programs": len(programs.made), "layers_s": sum(programs.seconds.values()),
        "again_s": time.perf_counter() - began,
    }  # fmt: skip


def _dynamo_times() -> dict[str, Any]:
    from torch._dynamo.utils import compilation_time_metrics

    found = {name: sum(each) for name, each in compilation_time_metrics.items()}
    names = {
        "entire_frame_compile": "frames_s", "backend_compile": "backends_s", "aot_collect_metadata": "metadata_s",
        "create_aot_dispatcher_function": "aot_autograd_s", "compile_fx_inner": "inductor_s",
    }  # fmt: skip
    return {to: found[name] for name, to in names.items() if name in found}


def child(way: str, layers: int, width: int, tokens: int, package: Path) -> dict[str, Any]:
    """Return what one process measures. Raise AssertionError if the scores differ."""
    scores = scores_of(spec_of(layers, width))
    inputs = torch.arange(tokens) * 7 % 512, torch.arange(tokens)
    with torch.no_grad():
        want = scores(*inputs)
        began, spent = time.perf_counter(), sum(os.times()[:4])
        function, parts = made(way, scores, inputs, package)
        got = function(*inputs)
        first, spent = time.perf_counter() - began, sum(os.times()[:4]) - spent
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        times = []
        for _ in range(9):
            at = time.perf_counter()
            function(*inputs)
            times.append(time.perf_counter() - at)
        return {"first_s": first, "first_cpu_s": spent, "ms": 1e3 * statistics.median(times), **parts()}


def measured(way: str, layers: int, width: int, tokens: int) -> list[dict[str, Any]]:
    """Return what a cold and a warm process say."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": f"{folder}/cache"}
        for state in ("cold", "warm"):
            given = [way, str(layers), str(width), str(tokens), f"{folder}/model.pt2"]
            command = [sys.executable, "-m", "ridgeline_bench.scripts.stack.starts", "child", *given]
            ran = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise OSError(f"{way}, {state}: {ran.stderr.strip().splitlines()[-1]}")
            found.append({"way": way, "state": state, **json.loads(ran.stdout.splitlines()[-1])})
    return found


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        way, layers, width, tokens, package = sys.argv[2:]
        print(json.dumps(child(way, int(layers), int(width), int(tokens), Path(package))))
        return
    a = asked(
        __doc__, ways=([OneOf(WAYS)], "to run it"), layers=(32, "of the decoder"), width=(256, "of the model"),
        tokens=(32, "of the sequence"), output=(Path, "the file of results"),
    )  # fmt: skip
    with told():
        check_counts(a, "layers", "width", "tokens")
        for way in a.ways:
            for line in measured(way, a.layers, a.width, a.tokens):
                shape = {"layers": a.layers, "width": a.width, "tokens": a.tokens, "threads": torch.get_num_threads()}
                keep(a.output, {"workload": "compiler start", **shape, **line})
                rest = {name: value for name, value in line.items() if name not in ("way", "state", "first_s", "ms")}
                print(f"{way:10} {line['state']:5} {line['first_s']:8.2f} s {line['ms']:8.2f} ms  {rest}", flush=True)


if __name__ == "__main__":
    main()
