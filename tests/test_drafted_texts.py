"""Texts with drafts are those without: several samples of a prompt, and stop strings that end among accepted drafts."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.test_speculation import Always

METHODS: dict[str, dict[str, Any]] = {
    "lookup": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 4},
    "chain": {"method": "eagle3", "num_speculative_tokens": 4},
    "tree": {"method": "eagle3", "num_speculative_tokens": 4, "eagle_topk": 3, "num_draft_tokens": 12},
}
PROMPTS = [
    "assert one == 1\nassert two == 2\nassert three == 3\nassert",
    "    self.width = width\n    self.height = height\n    self.",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
]
ASKED = [
    SamplingParams(temperature=0, max_tokens=40, stop=["\n\n", "self", " ="]),
    SamplingParams(temperature=0, max_tokens=40, stop=[")"], include_stop_str_in_output=True),
    SamplingParams(temperature=0.3, seed=9, max_tokens=24, n=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=30, n=3, logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=40, n=2, stop=["\n", "return"]),
]
Text = tuple[str, list[int], str | None, int | str | None]


def written(method: str | None) -> tuple[list[list[Text]], dict[str, int]]:
    """Return the samples of every prompt with all parameters, and the counts of drafts."""
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 256}
    config = {} if method is None else {"speculative_config": METHODS[method]}
    with LLM(dtype="float32", device="cpu", debug_checks=True, **limits, **config) as llm:
        running = llm.assembly.engine.scheduler.running
        if method is not None:
            running.drafting = Always()  # type: ignore[assignment]
            running.drafting.most = running.each - 1  # type: ignore[attr-defined]
        found = []
        for params in ASKED:
            for each in llm.generate(PROMPTS, params, use_tqdm=False):
                samples = sorted(each.outputs, key=lambda sample: sample.index)
                found.append([(s.text, list(s.token_ids), s.finish_reason, s.stop_reason) for s in samples])
        return found, dict(llm.assembly.engine.scheduler.figures().drafts or {})


@pytest.fixture(scope="module")
def plain() -> list[list[Text]]:
    return written(None)[0]


@pytest.mark.dealt
@pytest.mark.few(2)
@pytest.mark.parametrize(  # the passes of a chain are among those of a tree
    "method", [pytest.param(each, marks=pytest.mark.thorough if each == "chain" else ()) for each in METHODS]
)
def test_samples_and_stop_strings_are_those_of_plain_decoding(method: str, plain: list[list[Text]]) -> None:
    assert [len(samples) for samples in plain] == [params.n for params in ASKED for _ in PROMPTS]
    assert {stop for samples in plain for *_, stop in samples} >= {"\n\n", " =", ")", "\n"}
    assert all(len({text for text, *_ in samples}) == 3 for samples in plain[9:12])
    got, counts = written(method)
    assert got == plain
    assert counts["accepted_tokens"] > 40
