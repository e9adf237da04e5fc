"""deterministic=True keeps a request's bits in the company of hundreds of others of every kind.

The model is random, but its shapes are those of real ones, so that the kernels and tiles are too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.core.plan.request import Preemption, Request
from ridgeline.core.plan.token_bits import packed
from tests import tiny_models
from tests.driving import Rig, ask, rig
from tests.test_token_masks import Alternating

VOCAB = 32_000
SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}
QUIET = 0.2  # of the spread of the tiny models' weights: attention then looks at many keys, and many tokens are likely
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257, 333, 500)


class Even(Alternating):
    """Even and odd ids in turn, of any vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab

    def allowed(self) -> np.ndarray:
        return packed(np.arange(self.vocab) % 2 == self.count % 2)


def kinds(vocab: int) -> tuple[dict[str, Any], ...]:
    """Everything that a request may ask for."""
    return (
        {},
        {"prompt_logprobs": 2},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.95},
        {"temperature": 0.7, "min_p": 0.02},
        {"temperature": 1.0, "typical_p": 0.8},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 0.9, "frequency_penalty": 0.5, "logit_bias": {5: 2.0, 77: -3.0}},
        {"temperature": 1.0, "min_tokens": 6, "stop_ids": frozenset(range(0, vocab, max(50, vocab // 60)))},
        {"temperature": 1.0, "allowed_token_ids": list(range(3, vocab, 7)), "bad_words": [[10], [17, 24]]},
        {"temperature": 0.6, "mask": Even(vocab)},
        {"guidance_scale": 1.5},
    )


def save_model(folder: Path, **changes: Any) -> Path:
    """A llama of random weights with `SHAPES`."""
    model = tiny_models.build("llama", **{**SHAPES, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(QUIET)
    model.save_pretrained(folder)
    return folder


def mixed_requests(number: int, longest: int = 500, most: int = 40, vocab: int = VOCAB) -> list[Request]:
    """Of all kinds and lengths; half begin with one of three texts. Every one reports logprobs."""
    draw = random.Random(7)
    texts = [[draw.randrange(3, vocab) for _ in range(length)] for length in (40, 97, 256)]
    lengths = [length for length in LENGTHS if length <= longest]
    requests = []
    for n in range(number):
        kind = kinds(vocab)[n % len(kinds(vocab))]
        shared = draw.choice(texts) if draw.random() < 0.5 else []
        prompt = [*shared, *(draw.randrange(3, vocab) for _ in range(draw.choice(lengths)))][:longest]
        options = {
            "max_tokens": draw.randint(min(8, most), most),
            "seed": draw.getrandbits(60),
            "logprobs": draw.choice((0, 1, 4)),
        }
        requests.append(ask(f"{n}", prompt, **options, **kind))
    return requests


Bits = tuple[list[int], list[tuple[int, float]], list[Any]]


def bits_of(own: Rig) -> dict[str, Bits]:
    assert own.errors == []
    assert {name: outcome.error for name, outcome in own.outcomes.items() if outcome.error} == {}
    return {name: (outcome.tokens, outcome.scored, outcome.prompt) for name, outcome in own.outcomes.items()}


def one_by_one(own: Rig, requests: Iterable[Request]) -> dict[str, Bits]:
    for request in requests:
        own.run(request)
    return bits_of(own)


def arriving(own: Rig, requests: Iterable[Request], every_step: int, *, preempting: bool = False) -> dict[str, Bits]:
    """`every_step` more before each step, so that the company changes all the time. preempting: as if blocks were
    short, in every third step a request has to run its known tokens again."""
    left, draw, scheduler = list(requests), random.Random(1), own.engine.scheduler
    for step in count():
        if not left and not own.engine.has_work:
            return bits_of(own)
        own.add(*left[:every_step])
        del left[:every_step]
        if preempting and step % 3 == 2 and scheduler.running.decoding:
            scheduler._preempt(draw.choice([*scheduler.running.decoding]).leader, Preemption.BLOCKS)
        own.step()
    raise AssertionError


def difference(request: Request, alone: Bits, together: Bits) -> str:
    """Where they part first; "" if nowhere."""
    about = f"request {request.id}, {len(request.prompt_token_ids)} prompt tokens, {request.params!s:.240}"
    for name, part in (("prompt logprobs", 2), ("tokens with logprobs", 1), ("tokens", 0)):
        ours, theirs = alone[part], together[part]
        if ours != theirs:
            pairs = enumerate(zip_longest(ours, theirs))
            at = next(n for n, (a, b) in pairs if a != b)
            return f"{about}: {name} differ from {at} on: alone {ours[at : at + 2]}, together {theirs[at : at + 2]}"
    return ""


def report(requests: Iterable[Request], alone: Mapping[str, Bits], together: Mapping[str, Bits]) -> list[str]:
    found = [difference(request, alone[request.id], together[request.id]) for request in requests]
    return [line for line in found if line]


COMPANIES: dict[str, tuple[int, dict[str, Any]]] = {
    "all at once": (256, {"max_num_seqs": 300, "max_num_batched_tokens": 16_384}),
    "by and by, in odd chunks": (5, {"max_num_seqs": 200, "max_num_batched_tokens": 300}),
    "preempted": (40, {"max_num_seqs": 256, "max_num_batched_tokens": 1000}),
    "without graphs": (64, {"max_num_seqs": 256, "max_num_batched_tokens": 777, "enforce_eager": True}),
}


@pytest.mark.gpu
def test_256_requests_in_flight_get_the_bits_they_get_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "deterministic": True,
        "debug_checks": False,
        "block_size": 16,
        "max_model_len": 1024,
        "kv_cache_memory": 1 << 30,
    }
    with rig(folder, **options, max_num_seqs=2, max_num_batched_tokens=2048, enable_prefix_caching=False) as own:
        alone = one_by_one(own, mixed_requests(256))
    assert all(len(scored) == len(tokens) for tokens, scored, _ in alone.values())
    failed = {}
    for name, (every_step, settings) in COMPANIES.items():
        order = mixed_requests(256)
        random.Random(name).shuffle(order)
        with rig(folder, **{**options, **settings}) as own:
            together = arriving(own, order, every_step, preempting=name == "preempted")
            most = max(len(result.tokens_RK) for result in own.results)
            preempted = own.engine.scheduler.preemptions.total()
            print(f"{name}: {len(own.results)} steps, {preempted} preemptions, {most} rows")
        assert most >= 256 or name != "all at once"
        if different := report(order, alone, together):
            failed[name] = different
            print(f"{name}: {len(different)} of 256 differ", *different[:12], sep="\n  ")
    assert failed == {}, "\n".join(f"{name}:\n  " + "\n  ".join(lines[:12]) for name, lines in failed.items())


def test_the_comparison_sees_one_changed_bit(tmp_path: Path) -> None:
    """The workload itself, small and on a CPU, where bits may differ but a logprob's first digits do not."""
    small = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "head_dim": 32}
    folder = save_model(tmp_path, **small)
    with rig(folder, debug_checks=False, max_num_seqs=2, enable_prefix_caching=False) as own:
        alone = one_by_one(own, mixed_requests(13, longest=20, most=7, vocab=320))
    with rig(folder, debug_checks=False, max_num_seqs=16) as own:
        together = arriving(own, mixed_requests(13, longest=20, most=7, vocab=320), 3, preempting=True)
        assert own.engine.scheduler.preemptions.total() >= 3
    assert {name: bits[0] for name, bits in together.items()} == {name: bits[0] for name, bits in alone.items()}
    requests = mixed_requests(13, longest=20, most=7, vocab=320)
    assert len(alone["1"][2]) == len(requests[1].prompt_token_ids) - 1, "its prompt logprobs are compared too"
    assert report(requests, alone, alone) == []
    tokens, scored, prompt = alone["4"]
    last = scored[-1][0], float(np.nextafter(scored[-1][1], 0))
    [line] = report(requests, alone, {**alone, "4": (tokens, [*scored[:-1], last], prompt)})
    assert f"tokens with logprobs differ from {len(tokens) - 1} on" in line
