"""The memory that sleep frees, and the time to fall asleep and to wake up.

    python -m ridgeline_bench.scripts.sleep MODEL --dummy [--rounds 3]

Prints the device's memory in use before, asleep and awake again, and the seconds of both ways. The outputs of one
greedy prompt must be the same before and after.
"""

from __future__ import annotations

import json
import time

import torch

import ridgeline
from ridgeline_bench.scripts.asked import asked


def used() -> float:
    """Return the gigabytes in use on the device."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def main() -> None:
    a = asked(
        __doc__, "model", dummy=(False, "random weights"), rounds=3, options=("{}", "JSON of further arguments of LLM")
    )
    given = {"enable_sleep_mode": True, "skip_tokenizer_init": True, "max_model_len": 8192}
    if a.dummy:
        given["load_format"] = "dummy"
    llm = ridgeline.LLM(a.model, **given | json.loads(a.options))
    greedy = ridgeline.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(5, 105))}

    def tokens() -> list[int]:
        return list(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids)

    want, awake = tokens(), used()
    print(f"awake: {awake:.2f} GB in use")
    for number in range(a.rounds):
        began = time.perf_counter()
        llm.sleep()
        slept, asleep = time.perf_counter() - began, used()
        began = time.perf_counter()
        llm.wake_up()
        woke, first = time.perf_counter() - began, time.perf_counter()
        same = tokens() == want
        record = {
            "model": a.model, "round": number, "awake_gb": awake, "asleep_gb": asleep, "sleep_s": slept,
            "wake_s": woke, "first_output_s": time.perf_counter() - first, "same_tokens": same,
        }  # fmt: skip
        print(json.dumps(record))
        if not same:
            raise SystemExit("the tokens after a sleep are not those before it.")
    llm.shutdown()


if __name__ == "__main__":
    main()
