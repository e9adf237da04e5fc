"""A model as ONNX: exported with its key-value cache, checked against the engine, optimized and timed at each level.

    pip install 'ridgeline[onnx]'
    python -m ridgeline_bench.scripts.onnx_export FOLDER [--opsets 18 23] [--levels none basic extended all]
        [--providers cuda] [--threads 2] [--out FOLDER] [--output results.jsonl]
    python -m ridgeline_bench.scripts.onnx_export embedded --quick         # a CPU, a minute
    python -m ridgeline_bench.scripts.onnx_export embedded --page          # writes the tables of docs/onnx.md

torch.onnx.export (the exporter that follows torch.export) writes the graph of `onnx_network.py` for each opset. ONNX
Runtime loads it at each level of its graph optimization, and says which of its passes changed the graph. Greedy tokens
must be those of the engine, and every logit that of the network without a cache, within 1e-4 of the largest: a
session that differs has no figure. All figures are of float32 and one sequence, the least of --rounds runs.

The model is a folder or an embedded model's name. --providers is cpu, cuda or tensorrt. --out keeps the files: the
exported graph, and per level the one that ONNX Runtime made of it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.plan.request import SamplingParams
from ridgeline.layers.dense import DenseCausal
from ridgeline.perf.footprint import parameters
from ridgeline.weights.folder import resolve_model
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.scripts.asked import OneOf, asked, keep
from ridgeline_bench.scripts.driven import Driven, Wanted
from ridgeline_bench.scripts.onnx_network import CachedNetwork, export, open_network
from ridgeline_bench.scripts.onnx_sessions import LEVELS, PROVIDERS, Session, Spoken, check_provider, needed

TOLERANCE = 1e-4  # of the largest logit: float32, sums of some thousand products, some dozen layers


class Work(NamedTuple):
    """The prompt, the tokens that are wanted behind it, and how often all is done."""

    prompt: list[int]
    tokens: int
    rounds: int


class Figure(NamedTuple):
    """Milliseconds to the first token, and of each token behind it (the median)."""

    first_ms: float
    token_ms: float

    @staticmethod
    def least(runs: Sequence[Sequence[float]]) -> Figure:
        """Return the least of some runs, of which each is the seconds to the first token and between tokens."""
        return Figure(1e3 * min(run[0] for run in runs), 1e3 * min(statistics.median(run[1:]) for run in runs))


def of_engine(folder: Path, work: Work) -> tuple[list[int], Figure]:
    """Return the engine's greedy tokens, and its times."""
    driven = Driven(
        str(folder), dtype="float32", max_model_len=len(work.prompt) + work.tokens, max_num_seqs=1,
        enable_prefix_caching=False, device="cpu",
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=work.tokens, ignore_eos=True, detokenize=False)
    [answer] = driven.llm.generate([{"prompt_token_ids": work.prompt}], params, use_tqdm=False)
    runs = [driven.run([Wanted(work.prompt, work.tokens)]).answers[0] for _ in range(work.rounds)]
    driven.close()
    return list(answer.outputs[0].token_ids), Figure.least([[run.first, *run.between] for run in runs])


@torch.no_grad()
def of_network(network: CachedNetwork, work: Work, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits behind the prompt and behind each token but the last, without a cache: [tokens, V]."""
    read = torch.tensor([*work.prompt, *tokens[:-1]])
    hidden = network.decoder(read, torch.arange(len(read)), DenseCausal(1))
    found: np.ndarray = network.decoder.logits(hidden.at(slice(len(work.prompt) - 1, None))).numpy()
    return found


def fault(spoken: Spoken, tokens: Sequence[int], logits: np.ndarray) -> str | None:
    """Return in which way a session differs from the engine, None if it does not."""
    if spoken.tokens != list(tokens):
        place = next(n for n, (a, b) in enumerate(zip(spoken.tokens, tokens, strict=True)) if a != b)
        return f"token {place} is {spoken.tokens[place]}, and the engine's {tokens[place]}"
    error = float(np.abs(spoken.logits - logits).max() / np.abs(logits).max())
    return None if error <= TOLERANCE else f"a logit is off by {error:.1e} of the largest, above {TOLERANCE:.0e}"


def measured(session: Session, work: Work, tokens: Sequence[int], logits: np.ndarray) -> dict[str, Any]:
    """Return what became of the graph, and the times, or the fault."""
    runs = [session.speak(work.prompt, work.tokens) for _ in range(1 + work.rounds)]  # the first one warms up
    about = {
        "nodes": session.nodes, "passes": session.passes, "tried": session.tried, "load_seconds": session.load_seconds,
    }  # fmt: skip
    if wrong := fault(runs[0], tokens, logits):
        return {**about, "fault": wrong}
    error = float(np.abs(runs[0].logits - logits).max() / np.abs(logits).max())
    return {**about, "error": error, **Figure.least([run.seconds for run in runs[1:]])._asdict()}


def lines(folder: Path, out: Path, a: Any) -> Iterator[dict[str, Any]]:
    """Yield the engine's line, then one for each opset and level."""
    spec = read_model_config(folder).spec
    prompt = [int(each) for each in np.random.default_rng(0).integers(1, spec.vocab_size, a.prompt)]
    work, files = Work(prompt, a.tokens, a.rounds), {opset: out / f"opset{opset}.onnx" for opset in a.opsets}
    network = open_network(folder, a.prompt + a.tokens)
    for opset, file in files.items():
        export(network, file, opset)
    tokens, ours = of_engine(folder, work)
    logits = of_network(network, work, tokens)
    del network
    common = {
        "workload": "onnx", "model": folder.name, "weights_gb": 4 * parameters(spec).total / 1e9,
        "layers": len(spec.layers), "prompt": a.prompt, "tokens": a.tokens, "threads": a.threads,
    }  # fmt: skip
    yield {**common, "engine": "ridgeline", **ours._asdict()}
    version = needed("onnxruntime").__version__
    for opset, file in files.items():
        for level in a.levels:
            about = {"engine": "onnxruntime", "version": version, "provider": a.providers, "opset": opset}
            session = Session(file=file, level=level, provider=a.providers, threads=a.threads)
            found = measured(session, work, tokens, logits)
            del session  # before the next one takes as much memory
            yield {**common, **about, "level": level, **found}


def show(line: Mapping[str, Any]) -> str:
    """Return a line for people."""
    what = f"opset {line['opset']} {line['level']:9}" if "opset" in line else "the engine"
    times = line.get("fault") or f"{line['first_ms']:8.1f} ms to the first token {line['token_ms']:8.2f} ms a token"
    if "nodes" not in line:
        return f"{what:20} {times}"
    return f"{what:20} {times}  {sum(line['nodes'].values())} nodes; {len(line['passes'])} of {line['tried']} passes"


def main() -> None:
    a = asked(
        __doc__, "model", opsets=[18, 23], levels=list(LEVELS), providers=OneOf(tuple(PROVIDERS)),
        threads=(0, "of each engine; 0: as many as this process may use"), prompt=64, tokens=32, rounds=3, out=Path,
        output=Path, quick=(False, "a short prompt, one opset, the levels none and all"),
        page=(False, "write the tables of docs/onnx.md from stored results, and measure nothing"),
    )  # fmt: skip
    if a.page:
        from ridgeline_bench.scripts.onnx_page import write

        return write()
    if a.quick:
        a.opsets, a.levels, a.prompt, a.tokens, a.rounds = [23], ["none", "all"], 8, 4, 1
    a.threads = a.threads or available()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # so the engine keeps to this number
    torch.set_num_threads(a.threads)
    if unknown := sorted(set(a.levels) - set(LEVELS)):
        raise SystemExit(f"ridgeline: there is no level {unknown[0]!r}; known: {', '.join(LEVELS)}.")
    faults = 0
    try:
        needed("onnxscript"), needed("onnx"), check_provider(a.providers, needed("onnxruntime"))
        with tempfile.TemporaryDirectory() as made:
            out = a.out or Path(made)
            out.mkdir(parents=True, exist_ok=True)
            for line in lines(resolve_model(a.model), out, a):
                print(show(line), flush=True)
                keep(a.output, line)
                faults += "fault" in line
    except (InvalidConfig, ModelLoadError) as error:
        raise SystemExit(f"ridgeline: {error}") from error
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
