"""A model larger than its device: the rate that is printed before it runs, and the rate at which it runs.

    python -m ridgeline_bench.scripts.layers_below [--model FOLDER] [--layers 12] [--below 8] [--rows 64]
        [--quantization NAME] [--tp 1] [--tokens 16] [--device cuda] [--output FILE.jsonl] [--commit HASH]

FOLDER has a config.json; the default is that of Llama-3.1-70B, of which --layers are kept. Weights are random. --below
of the layers wait in the host's memory, page-locked, and come over the bus in every step, or as many bytes of a
mixture's experts do, where the engine predicts that this takes less time. --rows requests decode together.

    stated    the bytes of these layers over the bus's stated rate (`perf/bus.py`), or the limit of computing
    printed   the same at the rate of a copy that is timed when the engine starts
    measured  the time of a decode step, by two runs of unlike numbers of tokens
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import torch

from ridgeline import LLM, SamplingParams
from ridgeline.assembly.choices import choose
from ridgeline.core.plan.sharding import part_of
from ridgeline.core.settings.cache import WeightsWanted
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.bus import bus_rate
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.streamed import GIB, layer_bytes, layers_below
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
        quantization="",
        tp=1,
        tokens=16,
        device="cuda",
        dtype="bfloat16",
        output=("", "a file to which a line is added"),
        commit="",
    )
    changed = {"num_hidden_layers": a.layers}
    spec, device = read_model_config(Path(a.model), changed).spec, torch.device(a.device)
    forms = {"quantization": a.quantization} if a.quantization else {}
    config = LLMConfig(
        model=a.model, hf_overrides=changed, load_format="dummy", device=a.device, dtype=a.dtype, max_num_seqs=a.rows,
        max_model_len=512, kv_cache_memory=GIB, **forms,
    )  # fmt: skip
    exact = choose(config, device).precision
    part = part_of(spec, a.tp)
    gib = sum(layer_bytes(part, n, exact) for n in range(a.layers)) / a.layers * a.below / GIB
    config = replace(config, cpu_offload_gb=gib * 0.999)
    hardware = hardware_of(device)
    chosen = (
        choose(config, device).below if a.tp == 1 else layers_below(part, WeightsWanted(config.cpu_offload_gb), exact)
    )
    assert chosen is not None
    below = chosen
    shape = StepShape([1] * a.rows, [PROMPT + a.tokens] * a.rows, a.rows)
    alone = 0.0 if hardware is None else Roofline(part, hardware, exact).step_limit(shape)
    stated = below.seconds(alone, a.rows, bus_rate(hardware))
    print(f"{below.num_bytes / 1e9:.2f} GB of {below.what} below")
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
        cpu_offload_gb=config.cpu_offload_gb,
        tensor_parallel_size=a.tp,
        **forms,
        max_model_len=512,
        max_num_seqs=a.rows,
        max_num_batched_tokens=4096 if a.device == "cuda" else 512,
        kv_cache_memory=GIB,
    ) as llm:
        if a.tp > 1:
            facts = max(llm.assembly.worker.all_facts, key=lambda each: each.copying)
            rate = facts.below_bytes / facts.copying
        else:  # before any step
            rate = llm.assembly.local.runner.decoder.bytes_per_second()
        printed = below.seconds(alone, a.rows, rate)
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
        "below": below.what,
        "tp": a.tp,
        "quantization": a.quantization,
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
