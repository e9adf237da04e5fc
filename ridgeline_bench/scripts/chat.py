"""Chats with a long history: the time of their turns, through this engine or vLLM.

    python -m ridgeline_bench.scripts.chat MODEL --dummy [--engine vllm] [--conversations 16] [--turns 10]

Every conversation begins with a history of its own. A turn adds a question and lets the model answer; the next turn's
prompt is all of that. An engine that finds what it has computed runs only the question, and one that does not runs the
whole history again. All conversations take their turn together, and a turn ends when all have their answer.

Tokens are drawn at random, with the same seed for both engines, and answers have a fixed length.
"""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from typing import Any

from ridgeline_bench.scripts.apart import as_prompts, drawn, loaded
from ridgeline_bench.scripts.asked import OneOf, asked

DEFAULTS = {"conversations": 16, "turns": 10, "history": 8192, "question": 128, "answer": 128}


def engine_of(a: Namespace) -> tuple[Any, Any]:
    """Return the engine and its class of sampling parameters."""
    longest = a.history + a.turns * (a.question + a.answer) + 16
    given: dict[str, Any] = {"model": a.model, "max_model_len": longest, "skip_tokenizer_init": True, "seed": 0}
    if a.dummy:
        given["load_format"] = "dummy"
    given |= json.loads(a.options)
    if a.engine == "vllm":
        given = {"enable_prefix_caching": True, "gpu_memory_utilization": 0.9, "disable_log_stats": False} | given
    return loaded(a.engine, given)


def turns(a: Namespace, llm: Any, params: Any, vocabulary: int) -> list[float]:
    """Return the seconds of each turn."""
    draw = random.Random(1)
    chats = drawn(draw, a.conversations, a.history, vocabulary)
    found = []
    for _ in range(a.turns):
        for chat in chats:
            chat += [draw.randrange(vocabulary) for _ in range(a.question)]
        began = time.perf_counter()
        outputs = llm.generate(as_prompts(chats), params, use_tqdm=False)
        found.append(time.perf_counter() - began)
        for chat, output in zip(chats, outputs, strict=True):
            chat += output.outputs[0].token_ids
    return found


def main() -> None:
    a = asked(
        __doc__, "model", engine=OneOf(("ridgeline", "vllm")), dummy=(False, "random weights"),
        vocabulary=(100_000, "token ids below this are drawn"),
        options=("{}", "JSON of further arguments of the engine's LLM"), **DEFAULTS,
    )  # fmt: skip
    llm, sampling = engine_of(a)
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    warm = [{"prompt_token_ids": [1, 2, 3]}]
    llm.generate(warm, sampling(max_tokens=2, **greedy), use_tqdm=False)
    seconds = turns(a, llm, sampling(max_tokens=a.answer, **greedy), a.vocabulary)
    later = seconds[1:] or seconds
    tokens = a.conversations * a.answer
    record = {name: getattr(a, name) for name in ("model", "engine", *DEFAULTS)}
    record |= {"seconds": seconds, "later_turn": sum(later) / len(later), "total": sum(seconds)}
    print(json.dumps(record))
    rate = tokens / record["later_turn"]
    print(
        f"{a.engine}: {sum(seconds):.2f} s; the first turn {seconds[0]:.2f} s, a later one "
        f"{record['later_turn']:.3f} s ({rate:,.0f} tokens/s)"
    )


if __name__ == "__main__":
    main()
