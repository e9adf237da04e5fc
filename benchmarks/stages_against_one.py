"""A pipeline beside one device: do requests get the same tokens, and how long do prompts and decode steps take?

    python -m benchmarks.stages_against_one ridgeline/assets/embedded --dtype float32
    python -m benchmarks.stages_against_one benchmarks/models/llama-8b --dummy --stages 2 --batch 64 --input 1024

One process measures one number of stages and then ends, so that GPUs are free for the next call. `--tokens FILE` keeps
the tokens, and compares them with those that are there. (Random weights of a pipeline differ from those of one device.)
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from ridgeline import LLM, SamplingParams


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    """Return random prompts, the same ones each time."""
    choose = random.Random(0)
    return [{"prompt_token_ids": [choose.randrange(3, 3000) for _ in range(length)]} for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--eager", action="store_true", help="no captured graphs")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input", type=int, default=200)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--tokens", type=Path)
    a = parser.parse_args()
    began = time.monotonic()
    llm = LLM(
        a.model,
        dtype=a.dtype,
        device=a.device,
        pipeline_parallel_size=a.stages,
        tensor_parallel_size=a.tensor_parallel_size,
        load_format="dummy" if a.dummy else "auto",
        skip_tokenizer_init=True,
        enforce_eager=a.eager,
        enable_prefix_caching=False,
    )
    with llm:
        figures: dict[str, float | int] = {"stages": a.stages, "batch": a.batch, "ready_s": time.monotonic() - began}
        asked, tokens = prompts(a.batch, a.input), []
        llm.generate(asked[:2], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        for name, count in (("prompts_s", 1), ("all_s", a.output)):
            started = time.monotonic()
            done = llm.generate(asked, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
            figures[name] = time.monotonic() - started
            tokens = [list(result.outputs[0].token_ids) for result in done]
        figures["ms_a_step"] = 1000 * (figures["all_s"] - figures["prompts_s"]) / max(1, a.output - 1)
        figures["prompt_tokens_a_second"] = a.batch * a.input / figures["prompts_s"]
    if a.tokens is not None and a.tokens.exists():
        pairs = [each for rows in zip(json.loads(a.tokens.read_text()), tokens, strict=True) for each in zip(*rows)]  # noqa: B905
        figures["same_tokens"] = sum(one == other for one, other in pairs) / len(pairs)
    elif a.tokens is not None:
        a.tokens.write_text(json.dumps(tokens))
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
