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

import json
import random
import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline_bench.scripts.apart import Apart, as_prompts, drawn, loaded, seconds
from ridgeline_bench.scripts.asked import OneOf, asked, keep
from ridgeline_bench.scripts.speculation import row_length

Case = tuple[float | None, int]  # the share of right drafts, and the batch
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
        right_P = right_SP[slots_P, scores.index_P.long()] & (next_P >= 0)  # a slot that changed hands has no drafts
        forced_P = torch.where(right_P, next_P, 11 + (next_P == 11))
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


def prompts_of(batch: int, context: int, *, repeats: bool) -> list[Any]:
    """Return prompts of random tokens; or of a piece that is repeated with small changes."""
    pieces = drawn(random.Random(batch), batch, 64 if repeats else context, VOCABULARY)
    return as_prompts([(piece * -(-context // len(piece)))[:context] for piece in pieces])


def engine_of(a: Namespace, drafts: int) -> tuple[Any, Any]:
    """Return the engine and its class of sampling parameters."""
    given: dict[str, Any] = {"model": a.model, "max_model_len": a.context + a.tokens + 64, "seed": 0}
    given |= {"skip_tokenizer_init": True, "max_num_seqs": max(a.batches), **json.loads(a.options)}
    if a.dummy:
        given["load_format"] = "dummy"
    if drafts:
        proposer = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        if a.proposer:
            proposer = json.loads(a.proposer)
        given["speculative_config"] = {**proposer, "num_speculative_tokens": drafts}
    return loaded(a.engine, {**({"gpu_memory_utilization": 0.85} if a.engine == "vllm" else {}), **given})


def engine(a: Namespace, drafts: int) -> tuple[None, Callable[[Case], tuple[float, float]]]:
    """Return a function that measures the milliseconds for a token of every request, and the tokens of a row that
    verifies."""
    set_share: Callable[[float, int], None] = lambda share, salt: None  # noqa: E731
    if drafts and a.what == "shares":
        set_share = force(max(a.batches) + 1, a.context + a.tokens + 65)
    llm, sampling = engine_of(a, drafts)
    own = a.engine == "ridgeline"
    if own and drafts and a.what == "shares" and not a.choose:
        fix_width(llm.assembly.engine.scheduler.running, drafts)
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}

    def counted() -> dict[str, float]:
        return dict(llm.assembly.engine.scheduler.figures().drafts or {}) if own else {}

    def answer(case: Case) -> tuple[float, float]:
        share, batch = case
        prompts = prompts_of(batch, a.context, repeats=a.what == "lookup")
        set_share(share or 0.0, 0)
        times: dict[int, list[float]] = {1: [], a.tokens: []}
        warm_up = 4  # tokens, for the prefix cache
        if share is not None and a.choose:
            learn_anew(llm.assembly.engine.scheduler.running, drafts)
            warm_up = a.tokens  # from which the engine learns what pays
        llm.generate(prompts, sampling(max_tokens=warm_up, **greedy), use_tqdm=False)
        before = counted()
        for again in range(a.rounds):
            set_share(share or 0.0, again)
            for tokens, taken in times.items():
                params = sampling(max_tokens=tokens, **greedy)
                taken.append(seconds(partial(llm.generate, prompts, params, use_tqdm=False)))
        counts = {name: value - before.get(name, 0) for name, value in counted().items()}
        step = (statistics.median(times[a.tokens]) - statistics.median(times[1])) / (a.tokens - 1)
        return 1e3 * step, row_length(counts)

    return None, answer


def measured(a: Namespace, drafts: int) -> dict[Case, tuple[float, float]]:
    """Return (share, batch) → (milliseconds of a token of every request, tokens of a row that verifies)."""
    shares = a.shares if drafts and a.what == "shares" else [None]
    apart: Apart[Case, tuple[float, float]] = Apart(engine, a, drafts)
    found = {}
    for batch in a.batches:
        for share in shares:
            found[share, batch] = apart.ask((share, batch))
            print(a.engine, drafts, "drafts", (share, batch, *found[share, batch]), flush=True)
    apart.close()
    return found


def main() -> None:
    a = asked(
        __doc__, "what=shares|lookup", "model", engine=OneOf(("ridgeline", "vllm")), dummy=False, drafts=[3, 5],
        shares=[0.0, 0.6, 0.7, 0.8], batches=[1, 8], context=1024, tokens=257, rounds=3,
        proposer=(str, "JSON of a speculative_config, in the place of lookup's (with lookup)"),
        options=("{}", "JSON of further arguments of the engine's LLM"),
        choose=(False, "let the engine choose how many drafts (with shares)"), output=Path,
    )  # fmt: skip
    plain = measured(a, 0)
    table = Table("drafts", "share", "batch", "ms a token", "plain", "speedup", "tokens a row", "least ms", "over it")
    for drafts in a.drafts:
        found = measured(a, drafts)
        for (share, batch), (ms, length) in found.items():
            least, before = 0.0, plain[None, batch][0]
            if share is not None and not a.choose:
                least = found[a.shares[0], batch][0] / sum(share**k for k in range(drafts + 1))
            line = {
                "workload": f"verified steps: {a.what}", "engine": a.engine,
                "model": Path(a.model).name or "embedded",
                "drafts": drafts, "chosen": a.choose, "share": share, "batch": batch, "ms": ms, "plain_ms": before,
                "tokens_of_a_row": length, "least_ms": least, "context": a.context,
            }  # fmt: skip
            table.add_row(
                str(drafts), str(share), str(batch), f"{ms:.3f}", f"{before:.3f}",
                f"{before / ms:.2f}", f"{length:.2f}", f"{least:.3f}",
                f"{100 * (ms / least - 1):+.1f} %" if least else "",
            )  # fmt: skip
            keep(a.output, line)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
