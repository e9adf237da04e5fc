"""Steps that verify drafts: the time of a token at given shares of right drafts, and prompt lookup beside vLLM.

    python -m ridgeline_bench.scripts.verified_steps shares MODEL --dummy [--drafts 3 5] [--shares 0 0.6 0.7 0.8]
        [--batches 1 8]
    python -m ridgeline_bench.scripts.verified_steps lookup MODEL [--engine vllm] [--batches 1 8 64]

"shares" decides by a hash of position, slot and round whether a draft is right, each as if drawn alone, and lets the
device draw what makes it so; so it measures the machinery with a proposer that is free and as good as one likes,
whatever the weights. Of each share the time of a token is shown beside the least that arithmetic allows: the step's
time over the expected tokens 1 + a + … + a^k. A step is timed at the first share, which must be 0, so that it brings
one token. With no drafts the same requests are decoded plainly. With --choose the number of drafts is not forced: the
engine chooses it for each step, up to the given one, and begins to learn before it is timed at a share. Its times stand
beside those of fixed numbers, as of `--drafts 1 2 5` without it.

"lookup" continues prompts that repeat themselves, greedily, with and without drafts. Both engines should read the same
files (`ridgeline_bench/scripts/random_model.py` writes some; with --cycle what it writes repeats itself, so drafts are
right). With --proposer another way of drafting is measured on them, as a random head whose drafts are always wrong.

Each number of drafts has a process of its own. Requests have 1,024 tokens of context, or --context.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

VOCABULARY = 4_000  # token ids below this are drawn


def mixed(x: Tensor) -> Tensor:
    """Return 32 bits that look random for whole numbers of at most 32 bits, each bit of which moves half of those.

    Two rounds of xor, shift and multiply (Wellons' search for integer hashes, 2018): products stay below 2^63.
    """
    x = x & 0xFFFF_FFFF
    x = ((x ^ (x >> 16)) * 0x21F0_AAAD) & 0xFFFF_FFFF
    x = ((x ^ (x >> 15)) * 0x735A_2D97) & 0xFFFF_FFFF
    return x ^ (x >> 15)


def coins(index_P: Tensor, slot_P: Tensor, salt: Tensor) -> Tensor:
    """Return a number from 0 to 999 for every place of every slot, as if each had been drawn alone. [P]"""
    return mixed(index_P.long() ^ mixed(slot_P.long() ^ mixed(salt))) * 1000 >> 32


def force(slots: int, positions: int) -> Callable[[float, int], None]:
    """Let drafts of engines that are built from now on always be there, and be right with a probability. Return what
    sets that probability and a salt, another of which decides anew, also for captured graphs.

    All is decided beforehand, for so many slots and positions, so that steps have only to look it up.
    """
    from ridgeline.worker.speculation.drafted import VerifiedDraws
    from ridgeline.worker.speculation.lookup import Lookup

    note, draw = Lookup.note, VerifiedDraws._draw_behind
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slot_S1, position_P = torch.arange(slots, device=device)[:, None], torch.arange(positions, device=device)
    right_SP = torch.zeros(slots, positions, dtype=torch.bool, device=device)

    def noted(self: Lookup, *given: Any) -> None:
        note(self, *given)
        self.drafts_SD.copy_(torch.where(self.drafts_SD < 0, 7, self.drafts_SD))

    def drawn(self: VerifiedDraws, slots_R: Tensor, scores: Any, drafts: Any, features: Any) -> Tensor:
        token_P = draw(self, slots_R, scores, drafts, features)
        drafts_SD = self.proposer.drafts_SD
        width = drafts_SD.shape[1]
        slots_P = slots_R[drafts.row_P].long()
        next_P = drafts_SD[slots_P, drafts.column_P.clamp(max=width - 1)].long()
        forced_P = torch.where(right_SP[slots_P, scores.index_P.long()], next_P, 11 + (next_P == 11))
        return torch.where(drafts.column_P < width, forced_P, token_P)

    Lookup.note, VerifiedDraws._draw_behind = noted, drawn  # type: ignore[assignment, method-assign]

    def set_share(share: float, salt: int) -> None:
        salted = torch.tensor(salt, device=device)
        right_SP.copy_(coins(position_P, slot_S1, salted) < round(1000 * share))

    return set_share


def fix_width(running: Any, drafts: int) -> None:
    """Let rows of an engine verify as many drafts in every step in which they may."""
    from ridgeline.core.settings.speculation import MOST_VERIFIED

    running.drafting.width = lambda rows, masked: drafts if rows * (1 + drafts) <= MOST_VERIFIED else 0


def learn_anew(running: Any, drafts: int) -> None:
    """Let an engine forget how many drafts pay."""
    running.drafting = type(running.drafting)(drafts, depth=running._depth)


def prompts_of(batch: int, context: int, *, repeats: bool) -> list[dict[str, list[int]]]:
    """Return prompts of random tokens; or of a piece that is repeated with small changes."""
    draw, found = random.Random(batch), []
    for _ in range(batch):
        piece = [draw.randrange(VOCABULARY) for _ in range(64 if repeats else context)]
        tokens = [token for _ in range(-(-context // len(piece))) for token in piece][:context]
        found.append({"prompt_token_ids": tokens})
    return found


def engine_of(asked: argparse.Namespace, drafts: int) -> tuple[Any, Any]:
    """Return the engine and its class of sampling parameters."""
    given: dict[str, Any] = {"model": asked.model, "max_model_len": asked.context + asked.tokens + 64, "seed": 0}
    given |= {"skip_tokenizer_init": True, "max_num_seqs": max(asked.batches), **json.loads(asked.options)}
    if asked.dummy:
        given["load_format"] = "dummy"
    if drafts:
        proposer = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        if asked.proposer:
            proposer = json.loads(asked.proposer)
        given["speculative_config"] = {**proposer, "num_speculative_tokens": drafts}
    if asked.engine == "vllm":
        os.environ.update({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"})
        import vllm

        return vllm.LLM(**{"gpu_memory_utilization": 0.85, **given}), vllm.SamplingParams
    import ridgeline

    return ridgeline.LLM(**given), ridgeline.SamplingParams


def run(asked: argparse.Namespace, drafts: int, pipe: Any) -> None:
    """Send, for every share and batch, the milliseconds of a token and the tokens of a row that verifies."""
    shares: list[float | None] = [None]
    if drafts and asked.what == "shares":
        set_share, shares = force(max(asked.batches) + 1, asked.context + asked.tokens + 65), list(asked.shares)
    llm, sampling = engine_of(asked, drafts)
    own = asked.engine == "ridgeline"
    if own and drafts and asked.what == "shares" and not asked.choose:
        fix_width(llm.assembly.engine.scheduler.running, drafts)
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    for batch in asked.batches:
        prompts = prompts_of(batch, asked.context, repeats=asked.what == "lookup")
        for share in shares:
            if share is not None:
                set_share(share, 0)
            times: dict[int, list[float]] = {1: [], asked.tokens: []}
            warm_up = 4  # tokens, for the prefix cache
            if share is not None and asked.choose:
                learn_anew(llm.assembly.engine.scheduler.running, drafts)
                warm_up = asked.tokens  # from which the engine learns what pays
            llm.generate(prompts, sampling(max_tokens=warm_up, **greedy), use_tqdm=False)
            before = dict(llm.assembly.engine.scheduler.figures().drafts or {}) if own else {}
            for again in range(asked.rounds):
                if share is not None:
                    set_share(share, again)
                for tokens, taken in times.items():
                    began = time.perf_counter()
                    llm.generate(prompts, sampling(max_tokens=tokens, **greedy), use_tqdm=False)
                    taken.append(time.perf_counter() - began)
            after = dict(llm.assembly.engine.scheduler.figures().drafts or {}) if own else {}
            counts = {name: value - before.get(name, 0) for name, value in after.items()}
            length = 1 + counts["accepted_tokens"] / counts["drafts"] if counts.get("drafts") else 1.0
            step = (statistics.median(times[asked.tokens]) - statistics.median(times[1])) / (asked.tokens - 1)
            pipe.send((share, batch, 1e3 * step, length))
    pipe.send(None)


def measured(asked: argparse.Namespace, drafts: int) -> dict[tuple[float | None, int], tuple[float, float]]:
    """Return (share, batch) → (milliseconds of a token of every request, tokens of a row that verifies)."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=run, args=(asked, drafts, other))
    process.start()
    other.close()
    found: dict[tuple[float | None, int], tuple[float, float]] = {}
    while True:
        try:
            line = pipe.recv()
        except EOFError:
            raise SystemExit(f"{asked.engine} ended early; its standard error says why") from None
        if line is None:
            break
        found[line[:2]] = line[2:]
        print(asked.engine, drafts, "drafts", line, flush=True)
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["shares", "lookup"])
    parser.add_argument("model")
    parser.add_argument("--engine", choices=["ridgeline", "vllm"], default="ridgeline")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.6, 0.7, 0.8])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=257)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--proposer", help="JSON of a speculative_config, in the place of lookup's (with lookup)")
    parser.add_argument("--options", default="{}", help="JSON of further arguments of the engine's LLM")
    parser.add_argument("--choose", action="store_true", help="let the engine choose how many drafts (with shares)")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    plain = measured(asked, 0)
    table = Table("drafts", "share", "batch", "ms a token", "plain", "speedup", "tokens a row", "least ms", "over it")
    for drafts in asked.drafts:
        found = measured(asked, drafts)
        for (share, batch), (ms, length) in found.items():
            least, before = 0.0, plain[None, batch][0]
            if share is not None and not asked.choose:
                least = found[asked.shares[0], batch][0] / sum(share**k for k in range(drafts + 1))
            line = {
                "workload": f"verified steps: {asked.what}", "engine": asked.engine,
                "model": Path(asked.model).name or "embedded",
                "drafts": drafts, "chosen": asked.choose, "share": share, "batch": batch, "ms": ms, "plain_ms": before,
                "tokens_of_a_row": length, "least_ms": least, "context": asked.context,
                "date": time.strftime("%Y-%m-%d"),
            }  # fmt: skip
            table.add_row(
                str(drafts), str(share), str(batch), f"{ms:.3f}", f"{before:.3f}",
                f"{before / ms:.2f}", f"{length:.2f}", f"{least:.3f}",
                f"{100 * (ms / least - 1):+.1f} %" if least else "",
            )  # fmt: skip
            if asked.output is not None:
                from ridgeline_bench.results import host

                with asked.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line | asdict(host())) + "\n")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
