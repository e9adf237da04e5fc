"""The cost of token masks to a step: no row masked, one row, all rows.

    python -m ridgeline_bench.scripts.masks [--rows 256] [--vocab 151936] [--steps 20] [--device cuda]

Columns, in milliseconds a step (medians):

    grammar   llguidance finds what is allowed, for all masked rows in one call, in its threads ("-": not installed)
    drafts    four drafts of each masked row and the masks behind them, by what its grammar forces and by lookup
    due       `engine.masks.due` around grammar, for requests with a mask alone
    rules     the same for requests that have bad words and min_tokens too
    pack      the masks are written to page-locked memory and their upload is queued
    upload    the bytes cross to the device
    mask      the kernel that applies them
    sample    greedy sampling of all rows, after it
    before    the former way: bool [rows, vocabulary] is made and uploaded from ordinary memory

On a GPU upload, mask and sample are its own time, by events, and the others are wall-clock time. On a CPU all columns
but grammar are the process's CPU time, which other work on the machine changes little. OMP_NUM_THREADS=1 keeps waiting
threads out of it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.plan.step import Feature
from ridgeline.core.plan.token_bits import num_words, packed
from ridgeline.engine import masked_drafts
from ridgeline.engine import masks as engine_masks
from ridgeline.engine.sequence import Sequence
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.worker.masks import Masks
from ridgeline_bench.machine.timing import device_seconds
from ridgeline_bench.scripts.apart import seconds
from ridgeline_bench.scripts.asked import asked

BUS, MEMORY = 55e9, 4.0e12  # bytes per second that PCIe 5 and an H200's memory move
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "age": {"type": "integer"},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


TEXT = b'{"name":"anna","tags":["red"],"age":5} '  # of which grammars' masks have seen a part


class Fixed:
    """A `TokenMask` that costs nothing and allows half of the vocabulary."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._bits_W = packed(np.random.default_rng(seed).random(vocab) < 0.5)

    def accept(self, token_id: int) -> None:
        pass

    def allowed(self) -> np.ndarray:
        return self._bits_W


def made_up_tokens(vocab: int) -> list[bytes]:
    """Return all bytes, then random words about as long as a tokenizer's. The last token ends a text."""
    draw, letters = random.Random(0), b"etaoinshrdlucmfwygpbvkxqjz" * 3 + b' ",:{}[]0123456789.-\n'
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(found) < vocab - 1:
        word = bytes(draw.choices(letters, k=draw.randint(1, 9)))
        found[b" " + word if draw.random() < 0.4 else word] = None
    return [*found, b"<|end|>"]


def grammar_masks(count: int, vocab: int) -> list[Any]:
    """Return `GrammarMask`s that are some tokens into their texts, or none without llguidance."""
    if find_spec("llguidance") is None:
        return []
    from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

    from ridgeline.serving.grammars.kept import Compiled
    from ridgeline.serving.grammars.masks import GrammarMask

    class MadeUp:
        eos_token_id = vocab - 1
        bos_token_id = None
        tokens = made_up_tokens(vocab)
        special_token_ids = (vocab - 1,)

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    tokenizer, executor = LLTokenizer(TokenizerWrapper(MadeUp()), vocab), LLExecutor()
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    made = []
    for n in range(count):
        mask = GrammarMask(Compiled(LLMatcher(tokenizer, grammar, log_level=0), tokenizer), executor)
        for byte in TEXT[: n % 14]:
            mask.accept(byte)
        made.append(mask)
    return made


def milliseconds(work: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Return the median of the device's time; on a CPU that of the process's time."""
    times = []
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000)  # so that the host is ahead, and gaps between launches are not measured
            times.append(1e3 * device_seconds(work))
        else:
            times.append(1e3 * seconds(work, time.process_time))
    return median(times)


def dense(masks: Mapping[int, np.ndarray], rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Upload the masks in their former form, as bool [rows, vocabulary]."""
    mask_RV = np.ones((rows, vocab), np.bool_)
    for row, bits_W in masks.items():
        mask_RV[row] = np.unpackbits(bits_W.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)
    return torch.from_numpy(mask_RV).to(device)


class Bench:
    """Logits, tables and masks of `rows` rows, and the figures of a case."""

    def __init__(self, rows: int, vocab: int, steps: int, device: torch.device) -> None:
        self.rows, self.vocab, self.steps, self.device = rows, vocab, steps, device
        self.ops = Ops(Platform.of(device))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        self.logits_RV = torch.randn(rows, vocab, dtype=dtype, device=device, generator=generator)
        self.tables = SamplingTables.empty(rows, vocab, device)
        self.slots_R = torch.arange(rows, dtype=torch.int32, device=device)
        self.position_R = torch.ones(rows, dtype=torch.int64, device=device)
        self.grammars = grammar_masks(rows, vocab)

    def case(self, masked: int) -> dict[str, float | None]:
        seqs = {row: self.sequence(row) for row in range(masked)}
        ruled = {row: self.sequence(row, bad_words=[[5], [6, 7]], min_tokens=4) for row in range(masked)}
        found: dict[str, float | None] = {"grammar": self.grammar(masked)}
        found["due"] = self.host_time(lambda: self.due(seqs)) if masked else 0.0
        found["rules"] = self.host_time(lambda: self.due(ruled)) if masked else 0.0
        found["drafts"] = self.drafts(masked)
        masks = self.due(seqs)
        found |= dict.fromkeys(("pack", "upload", "mask"), 0.0)
        if masked:
            sent = Masks.of(masks, self.vocab, self.device)
            found["pack"] = self.host_time(lambda: self.upload(masks))
            if self.device.type == "cuda":
                staged = torch.empty(masked, num_words(self.vocab), dtype=torch.int32, pin_memory=True)
                found["upload"] = self.time(lambda: staged.to(self.device, non_blocking=True))
            found["mask"] = self.time(lambda: self.ops.mask_logits(self.logits_RV, *sent))
            found["before"] = self.host_time(lambda: dense(masks, self.rows, self.vocab, self.device))
        arguments = self.tables, self.slots_R, self.position_R, Feature.NONE
        found["sample"] = self.time(lambda: self.ops.sample(self.logits_RV, *arguments))
        return found

    def time(self, work: Callable[[], Any]) -> float:
        work()
        return milliseconds(work, self.steps, self.device)

    def host_time(self, work: Callable[[], Any]) -> float:
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        return 1e3 * median(seconds(work, clock) for _ in range(self.steps))

    def upload(self, masks: Mapping[int, np.ndarray]) -> None:
        Masks.of(masks, self.vocab, self.device)

    def due(self, seqs: Mapping[int, Sequence]) -> dict[int, np.ndarray]:
        return engine_masks.due(seqs, self.fail)

    def fail(self, seq: Sequence, error: str) -> None:
        raise RuntimeError(error)

    def sequence(self, row: int, **rules: Any) -> Sequence:
        params = SamplingParams(temperature=0, max_tokens=9, **rules)
        request = Request(
            id=str(row),
            prompt_token_ids=(6,),
            params=params,
            seed=0,
            max_total_tokens=10,
            stop_ids=frozenset([3]),
            token_mask=Fixed(self.vocab, row),
        )
        return Sequence(engine_masks.constrained(request, self.vocab), 1)

    def drafts(self, masked: int) -> float | None:
        """Return the time in which drafts are made for requests whose prompts hold the text of their grammar."""
        if not self.grammars:
            return None
        seqs = {}
        for row, mask in enumerate(self.grammars[:masked]):
            prompt = (*TEXT * 20, *TEXT[: row % 14])
            params = SamplingParams(temperature=0, max_tokens=99)
            request = Request(
                id=str(row), prompt_token_ids=prompt, params=params, seed=0, max_total_tokens=1000, token_mask=mask
            )
            seqs[row] = Sequence(request, 1)
        masks = self.due(seqs)
        asked = {row: (seq, 4) for row, seq in seqs.items()}

        def drafted() -> int:
            found = masked_drafts.drafted(asked, dict(masks), (1, 3), self.fail)
            return sum(len(token_ids_D) for token_ids_D, _ in found.values())

        if not masked:
            return 0.0
        assert drafted() > 3 * masked
        return self.host_time(drafted)

    def grammar(self, masked: int) -> float | None:
        if not self.grammars:
            return None
        asked = self.grammars[:masked]
        times = []
        for _ in range(self.steps if masked else 0):
            for mask in asked:
                mask._allowed_W = None
            times.append(1e3 * seconds(lambda: engine_masks.prepare(asked)))
        return median(times) if times else 0.0


def main() -> None:
    a = asked(__doc__, rows=256, vocab=151_936, steps=20, device="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(a.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: {a.rows} rows x {a.vocab} tokens, {a.steps} steps")
    bits = 4 * num_words(a.vocab)
    with torch.inference_mode():
        bench = Bench(a.rows, a.vocab, a.steps, device)
        names = ("grammar", "drafts", "due", "rules", "pack", "upload", "mask", "sample", "before")
        print("masked " + "".join(f"{name:>10}" for name in names) + f"{'least upload':>14}{'least mask':>12}")
        for masked in sorted({0, 1, a.rows}):
            times = bench.case(masked)
            shown = "".join(f"{'-' if (t := times.get(name)) is None else f'{t:.3f}':>10}" for name in names)
            moved = masked * (bits + 2 * a.vocab * bench.logits_RV.element_size())
            print(f"{masked:6d} {shown}{1e3 * masked * bits / BUS:14.3f}{1e3 * moved / MEMORY:12.3f}")


if __name__ == "__main__":
    main()
