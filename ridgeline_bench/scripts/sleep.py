"""What sleeping gives back, and how long it takes to fall asleep and to wake up.

    python -m ridgeline_bench.scripts.sleep MODEL --dummy [--rounds 3]

Prints the device's memory in use before, asleep and awake again, and the seconds of both ways. The outputs of one
greedy prompt must be the same before and after.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import ridgeline


def used() -> float:
    """Return the gigabytes in use on the device."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="{}", help="JSON of further arguments of LLM")
    options = parser.parse_args()
    given = {"enable_sleep_mode": True, "skip_tokenizer_init": True, "max_model_len": 8192}
    if options.dummy:
        given["load_format"] = "dummy"
    llm = ridgeline.LLM(options.model, **given | json.loads(options.options))
    greedy = ridgeline.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(5, 105))}

    def tokens() -> list[int]:
        return list(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids)

    want, awake = tokens(), used()
    print(f"awake: {awake:.2f} GB in use")
    for number in range(options.rounds):
        began = time.perf_counter()
        llm.sleep()
        slept, asleep = time.perf_counter() - began, used()
        began = time.perf_counter()
        llm.wake_up()
        woke, first = time.perf_counter() - began, time.perf_counter()
        same = tokens() == want
        record = {
            "model": options.model, "round": number, "awake_gb": awake, "asleep_gb": asleep, "sleep_s": slept,
            "wake_s": woke, "first_output_s": time.perf_counter() - first, "same_tokens": same,
        }  # fmt: skip
        print(json.dumps(record))
        if not same:
            raise SystemExit("the tokens after a sleep are not those before it.")
    llm.shutdown()


if __name__ == "__main__":
    main()
