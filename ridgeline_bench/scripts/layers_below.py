"""A model larger than its device: the rate that is printed before it runs, and the rate at which it runs.

    python -m ridgeline_bench.scripts.layers_below [--model FOLDER] [--layers 12] [--below 8] [--rows 64]
        [--tokens 16] [--device cuda] [--output FILE.jsonl] [--commit HASH]

FOLDER has a config.json; the default is that of Llama-3.1-70B, of which --layers are kept. Weights are random. --below
of the layers wait in the host's memory, page-locked, and come over the bus in every step. --rows requests decode
together.

    stated    the bytes of these layers over the bus's stated rate (`perf/bus.py`), or the limit of computing
    printed   the same at the rate of a copy that is timed when the engine starts
    measured  the time of a decode step, by two runs of unlike numbers of tokens
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from ridgeline import LLM, SamplingParams
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.bus import bus_rate
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.streamed import GIB, StreamedCost, layers_below
from ridgeline.weights.loader import read_model_config
from ridgeline.worker.machine import device_name, hardware_of
from ridgeline_bench.scripts.asked import asked, keep

PROMPT = 32


def main() -> None:
    a = asked(
        __doc__,
        model="benchmarks/models/llama-70b",
        layers=12,
        below=8,
        rows=64,
        tokens=16,
        device="cuda",
        dtype="bfloat16",
        output=("", "a file to which a line is added"),
        commit="",
    )
    changed = {"num_hidden_layers": a.layers}
    spec, device = read_model_config(Path(a.model), changed).spec, torch.device(a.device)
    exact = precision(a.dtype)
    one = layers_below(spec, 1e-9, exact.item)
    gib = one.num_bytes / len(one.layers) * a.below / GIB
    below, hardware = layers_below(spec, gib, exact.item), hardware_of(device)
    shape = StepShape([1] * a.rows, [PROMPT + a.tokens] * a.rows, a.rows)
    computing = None if hardware is None else Roofline(spec, hardware, exact)
    stated = below.num_bytes / bus_rate(hardware)
    stated = stated if computing is None else StreamedCost(computing, stated).step_limit(shape)
    print(f"{len(below.layers)} of {a.layers} layers below, {below.num_bytes / 1e9:.2f} GB: {below.layers}")
    print(f"stated: {1e3 * stated:.1f} ms a step, {a.rows / stated:.0f} tokens/s", flush=True)
    random.seed(0)
    top = spec.vocab_size
    prompts = [{"prompt_token_ids": [random.randrange(10, top) for _ in range(PROMPT)]} for _ in range(a.rows)]
    started = time.perf_counter()
    with LLM(
        a.model,
        hf_overrides=changed,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=a.device,
        dtype=a.dtype,
        cpu_offload_gb=gib,
        max_model_len=512,
        max_num_seqs=a.rows,
        max_num_batched_tokens=4096 if a.device == "cuda" else 512,
        kv_cache_memory=GIB,
    ) as llm:
        streamed = llm.assembly.local.runner.decoder.streamed
        assert streamed is not None
        rate = streamed.bytes_per_second()
        printed = streamed.num_bytes / rate
        printed = printed if computing is None else StreamedCost(computing, printed).step_limit(shape)
        print(f"started in {time.perf_counter() - started:.1f} s; layers come at {rate / 1e9:.1f} GB/s")
        print(f"printed: {1e3 * printed:.1f} ms a step, {a.rows / printed:.0f} tokens/s", flush=True)
        few, many = 4, 4 + a.tokens
        seconds = {few: 1e9, many: 1e9}
        for count in (few, few, many, few, many):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            before = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds[count] = min(seconds[count], time.perf_counter() - before)
    measured = (seconds[many] - seconds[few]) / (many - few)
    print(f"measured: {1e3 * measured:.1f} ms a step, {a.rows / measured:.0f} tokens/s")
    print(f"{printed / measured:.1%} of the printed rate, {stated / measured:.1%} of the stated one")
    line = {
        "kind": "layers below",
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": a.commit,
        "model": Path(a.model).name,
        "layers": a.layers,
        "below": len(below.layers),
        "bytes": below.num_bytes,
        "rows": a.rows,
        "bytes_per_second": rate,
        "stated_seconds": stated,
        "printed_seconds": printed,
        "measured_seconds": measured,
    }
    keep(Path(a.output) if a.output else None, line)


if __name__ == "__main__":
    main()
