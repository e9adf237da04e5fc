"""Chats with a long history: the time of their turns, through this engine or vLLM.

    python -m ridgeline_bench.scripts.chat MODEL --dummy [--engine vllm] [--conversations 16] [--turns 10]

Every conversation begins with a history of its own. A turn adds a question and lets the model answer; the next turn's
prompt is all of that. An engine that finds what it has computed runs only the question, and one that does not runs the
whole history again. All conversations take their turn together, and a turn ends when all have their answer.

Tokens are drawn at random, with the same seed for both engines, and answers have a fixed length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

DEFAULTS = {"conversations": 16, "turns": 10, "history": 8192, "question": 128, "answer": 128}
VLLM = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def engine_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the engine and its class of sampling parameters."""
    longest = options.history + options.turns * (options.question + options.answer) + 16
    given: dict[str, Any] = {"model": options.model, "max_model_len": longest, "skip_tokenizer_init": True, "seed": 0}
    if options.dummy:
        given["load_format"] = "dummy"
    given |= json.loads(options.options)
    if options.engine == "vllm":
        os.environ.update(VLLM | os.environ)
        import vllm

        given = {"enable_prefix_caching": True, "gpu_memory_utilization": 0.9, "disable_log_stats": False} | given
        return vllm.LLM(**given), vllm.SamplingParams
    import ridgeline

    return ridgeline.LLM(**given), ridgeline.SamplingParams


def turns(options: argparse.Namespace, llm: Any, params: Any, vocabulary: int) -> list[float]:
    """Return the seconds of each turn."""
    draw = random.Random(1)
    chats = [[draw.randrange(vocabulary) for _ in range(options.history)] for _ in range(options.conversations)]
    found = []
    for _ in range(options.turns):
        for chat in chats:
            chat += [draw.randrange(vocabulary) for _ in range(options.question)]
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": chat} for chat in chats], params, use_tqdm=False)
        found.append(time.perf_counter() - began)
        for chat, output in zip(chats, outputs, strict=True):
            chat += output.outputs[0].token_ids
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", choices=["ridgeline", "vllm"], default="ridgeline")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="token ids below this are drawn")
    parser.add_argument("--options", default="{}", help="JSON of further arguments of the engine's LLM")
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    llm, sampling = engine_of(options)
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    warm = [{"prompt_token_ids": [1, 2, 3]}]
    llm.generate(warm, sampling(max_tokens=2, **greedy), use_tqdm=False)
    seconds = turns(options, llm, sampling(max_tokens=options.answer, **greedy), options.vocabulary)
    later = seconds[1:] or seconds
    tokens = options.conversations * options.answer
    record = {name: getattr(options, name) for name in ("model", "engine", *DEFAULTS)}
    record |= {"seconds": seconds, "later_turn": sum(later) / len(later), "total": sum(seconds)}
    print(json.dumps(record))
    rate = tokens / record["later_turn"]
    print(
        f"{options.engine}: {sum(seconds):.2f} s; the first turn {seconds[0]:.2f} s, a later one "
        f"{record['later_turn']:.3f} s ({rate:,.0f} tokens/s)"
    )


if __name__ == "__main__":
    main()
