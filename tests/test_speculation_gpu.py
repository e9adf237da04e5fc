"""Drafts on a GPU, in captured graphs: the same tokens as without them where rounding does not depend on the step, and
fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.worker.inputs import Shape
from ridgeline.worker.step import DeviceStep
from tests.test_speculation import Turning

pytestmark = pytest.mark.gpu

LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPTS = [
    "assert one == 1\nassert two == 2\nassert three == 3\nassert",
    "    self.width = width\n    self.height = height\n    self.",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "x = [1, 2, 3, 1, 2, 3, 1, 2,",
    "import os\n",
]
COMMON: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True}
ASKED = [
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=0.8, seed=3, **COMMON),
    SamplingParams(temperature=1.0, top_p=0.8, top_k=40, seed=5, **COMMON),
    SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=1, **COMMON),
    SamplingParams(temperature=0, min_tokens=20, stop=["\n\n"], max_tokens=80),
    SamplingParams(temperature=0, bad_words=["three"], **COMMON),
]


def written(*, in_turns: bool = False, **settings: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Return the tokens of all prompts with all parameters, and the counts of drafts. in_turns: steps verify now so
    many drafts and now so many, whether that pays or not."""
    limits: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,  # lookahead's rows have 57 tokens
        "kv_cache_memory": 1 << 27,
        "max_model_len": 256,
    }
    with LLM(device="cuda", **{**limits, **settings}) as llm:
        found, running = [], llm.assembly.engine.scheduler.running
        if in_turns:
            running.drafting = turning = Turning()  # type: ignore[assignment]
            turning.most, turning.whole = running.each - 1, running._depth is not None
        for params in ASKED:
            found += [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params, use_tqdm=False)]
        return found, dict(llm.assembly.engine.scheduler.figures().drafts or {})


METHODS: dict[str, dict[str, Any]] = {
    "lookup": LOOKUP,
    "recent": {**LOOKUP, "lookup_recent_tokens": 4096},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "layer_skip": {"method": "layer_skip", "num_speculative_tokens": 3},
    "static tree": {
        "method": "eagle3",
        "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]",
    },
    "dynamic tree": {"method": "eagle3", "num_speculative_tokens": 4, "eagle_topk": 4, "num_draft_tokens": 16},
    "cascade": {**LOOKUP, "method": "draft_model"},
    "lookahead": {"method": "lookahead"},
}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_plain_decoding(method: str, eager: bool) -> None:
    settings = {"dtype": "float32", "deterministic": True, "enforce_eager": eager}
    want, _ = written(**settings)
    got, counts = written(in_turns=True, speculative_config=METHODS[method], **settings)
    assert got == want
    assert counts["accepted_tokens"] > (0 if method in ("layer_skip", "lookahead") else 100)


def test_most_tokens_agree_in_bfloat16_and_prefixes_are_found() -> None:
    """Products of five rows may round other than products of one, so texts may part at near ties."""
    want, _ = written(dtype="bfloat16")
    got, counts = written(dtype="bfloat16", speculative_config=LOOKUP)
    assert sum(a == b for a, b in zip(got, want, strict=True)) > len(want) // 2
    assert counts["accepted_tokens"] > 100


def test_steps_that_verify_replay_graphs() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory": 1 << 27}
    with LLM(device="cuda", speculative_config=LOOKUP, **limits) as llm:
        graphs = llm.assembly.local.runner.launch.graphs  # type: ignore[union-attr]
        replayed = list[Shape]()
        for (shape, _, _), graph in graphs._graphs.items():

            def forward(
                step: DeviceStep, shape: Shape = shape, run: Callable[[DeviceStep], None] = graph.forward
            ) -> None:
                replayed.append(shape)
                run(step)

            graph.forward = forward  # type: ignore[method-assign]
        llm.generate(PROMPTS[:3], ASKED[0], use_tqdm=False)
    verified = [shape for shape in replayed if shape.each > 1]
    assert len(verified) > 10
    assert {shape.each for shape in verified} <= {2, 3, 5}
    assert {shape.rows for shape in verified} <= {1, 2, 4}


def test_what_others_wrote_is_found() -> None:
    """A second run of the same prompts and parameters finds all of its text."""
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory": 1 << 27}
    config = {**LOOKUP, "prompt_lookup_min": 3, "lookup_recent_tokens": 65_536}
    settings = {"dtype": "float32", "deterministic": True, "speculative_config": config}
    with LLM(device="cuda", **limits, **settings) as llm:
        texts, right = [], [0]
        for _ in range(2):
            answers = llm.generate(PROMPTS, ASKED[1], use_tqdm=False)
            texts.append([list(each.outputs[0].token_ids) for each in answers])
            right.append(dict(llm.assembly.engine.scheduler.figures().drafts or {})["accepted_tokens"])
    assert texts[0] == texts[1]
    assert right[2] - right[1] > max(100, 1.5 * right[1])
