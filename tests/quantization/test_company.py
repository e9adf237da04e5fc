"""Quantized weights and a request's company: others in its steps, chunks of its prompt, and drafts.

Products of codes on a CPU give a row the same bits in any company (tests/kernels/gemm/test_coded_cpu.py). Attention and
the products of plain numbers do not, in float32's last digits, and an activation on the border of two int8 levels then
falls to the other one. So logprobs may differ, by no more than rounding of activations moves them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.core.plan.request import Request
from tests import gguf_files, tiny_models
from tests.driving import Outcome, ask, rig
from tests.test_speculation import LOOKUP, Always, prompt, scripted
from tests.weights.quantized_files import SCHEMES, quantize

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
WIDER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# codes as plain numbers, so that no activation is rounded
UNROUNDED = {"coded_linear": "torch"}
ALONE: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
CODED = ("gguf Q8_0", "gguf Q5_1", "gptq order", "ct nvfp4")
SEVERAL = (
    *(*CODED, "gguf Q4_0", "gptq", "awq", "bnb int8", "bnb nf4", "ct w3"),
    *("ct int8", "fp8 dynamic", "fp8 static", "ct fp8 channel", "fp8 blocks"),
)


def written(name: str, folder: Path, **sizes: Any) -> Path:
    """A llama of such a format."""
    if not name.startswith("gguf "):
        return quantize("llama", SCHEMES[name], folder / "model", **sizes)[0]
    kinds = {"*": name.removeprefix("gguf ")}
    return gguf_files.write(tiny_models.build("llama", **sizes), folder / "model.gguf", kinds=kinds)


def asked(number: int) -> list[Request]:
    return [ask(f"{n}", prompt(40 - n, n), max_tokens=20, logprobs=0, prompt_logprobs=0) for n in range(number)]


def run(
    folder: Path, requests: Sequence[Request], drafts_of: dict[str, Outcome] | None = None, **settings: Any
) -> dict[str, Outcome]:
    """Return the outcomes of the requests. drafts_of: outcomes that requests verify drafts for in every step, most of
    them right on a CPU, and found in the text on a GPU; otherwise there are no drafts."""
    speculation = {"speculative_config": LOOKUP} if drafts_of else {}
    with rig(folder, **speculation, **settings) as own:
        if drafts_of and settings.get("device") == "cuda":
            own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        elif drafts_of:
            scripted(own, drafts_of, requests, 0.7)
        outcomes = own.run(*requests)
        assert not own.errors
        if drafts_of:
            counts = own.engine.scheduler.figures().drafts
            assert counts is not None
            assert counts["draft_tokens"] > 10
        return outcomes


def prompts(outcomes: dict[str, Outcome]) -> np.ndarray:
    """The logprobs of all tokens of all prompts."""
    return np.array([entry.logprob for outcome in outcomes.values() for entry in outcome.prompt])


def moved(one: dict[str, Outcome], other: dict[str, Outcome]) -> np.ndarray:
    """By how much the logprobs of two runs differ, until their tokens do."""
    found = [*abs(prompts(one) - prompts(other))]
    for name, outcome in one.items():
        for (token, logprob), (their_token, their_logprob) in zip(outcome.scored, other[name].scored, strict=True):
            if token != their_token:
                break
            found.append(abs(logprob - their_logprob))
    return np.array(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CODED)
def test_company_moves_logprobs_far_less_than_rounding_activations_does(name: str, tmp_path: Path) -> None:
    folder, requests = written(name, tmp_path, **SIZES), asked(6)
    plain = run(folder, requests, **ALONE)
    unrounded = run(folder, requests, kernels=UNROUNDED, **ALONE)
    rounding = abs(prompts(plain) - prompts(unrounded))
    if not np.median(rounding) > 1e-3:
        pytest.skip("no activation is rounded here: without a compiler or AVX2 codes become plain numbers")
    chunks = {**ALONE, "max_num_seqs": 4, "max_num_batched_tokens": 6}
    for drafts, settings in ((False, chunks), (True, {**ALONE, "max_num_seqs": 4})):
        own = run(folder, requests, plain if drafts else None, **settings)
        difference = moved(own, plain)
        assert len(difference) > len(prompts(plain)) + 80
        assert np.median(difference) < np.median(rounding) / 100
        assert difference.max() < rounding.max()
        own = run(folder, requests, unrounded if drafts else None, kernels=UNROUNDED, **settings)
        assert moved(own, unrounded).max() < 5e-4  # as of plain weights: sums in another order, 2.1e-4 at most seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEVERAL)
def test_a_quantized_model_gives_the_same_bits_in_any_company_in_deterministic_mode(name: str, tmp_path: Path) -> None:
    folder, requests = written(name, tmp_path, **WIDER), asked(12)
    common: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "deterministic": True,
        "debug_checks": False,
        "block_size": 16,
        "kv_cache_memory": 1 << 26,
        "enable_prefix_caching": False,
    }
    want = run(folder, requests, max_num_seqs=1, max_num_batched_tokens=64, **common)
    for drafts, settings in (
        (False, {"max_num_seqs": 12, "max_num_batched_tokens": 512}),
        (False, {"max_num_seqs": 5, "max_num_batched_tokens": 16, "enforce_eager": True}),
        (True, {"max_num_seqs": 1, "max_num_batched_tokens": 64}),
        (True, {"max_num_seqs": 12, "max_num_batched_tokens": 512}),
    ):
        got = run(folder, requests, want if drafts else None, **settings, **common)
        for each, outcome in want.items():
            assert got[each].tokens == outcome.tokens, (each, drafts, settings)
            assert got[each].scored == outcome.scored, (each, drafts, settings)
            assert got[each].prompt == outcome.prompt, (each, drafts, settings)
