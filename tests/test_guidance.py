"""Classifier-free guidance against transformers, in float32 with debug checks on.

float32 on logits of order ten, which guidance multiplies by up to three: 1e-3 is three hundred roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.step import Feature
from ridgeline.kernels.sampling import torch_ops
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.text.outputs import CompletionOutput
from tests import tiny_models
from tests.driving import ask, rig
from tests.test_token_masks import Alternating, parities

TOLERANCE = 1e-3
SHARED = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83]
PROMPTS = ([5, 6, 7], [9] * 30 + [3], SHARED, [*SHARED, 100], [*SHARED, 100, 102], [8], list(range(10, 60)))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# by prompt: with and without a negative prompt (one begins as its prompt does, others are longer or shorter), unguided
GUIDANCE: tuple[dict, ...] = (
    {"guidance_scale": 1.5, "negative_prompt": [50, 51, 52, 53, 54, 55, 56]},
    {"guidance_scale": 3.0},
    {"guidance_scale": 2.0, "negative_prompt": SHARED[:17]},
    {},
    {"guidance_scale": 0.0, "negative_prompt": list(range(100, 140))},
    {"guidance_scale": -1.0, "negative_prompt": [6]},
    {"guidance_scale": 0.5, "negative_prompt": [3, 200]},
)
TIGHT: dict = {"max_num_batched_tokens": 16, "block_size": 4, "max_num_seqs": 5, "max_model_len": 96}

oracle = cache(tiny_models.build)


@pytest.fixture
def open_llm(tiny_model: Callable[[str], Path]):
    """`open_llm(family, **settings)`: an LLM that is shut down when the test ends."""
    opened: list[LLM] = []

    def build(family: str, **settings: object) -> LLM:
        options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "debug_checks": True, **settings}
        opened.append(LLM(tiny_model(family), **options))
        return opened[-1]

    yield build
    for llm in opened:
        llm.shutdown()


def generated(family: str, prompt: Sequence[int], guidance: dict, **options: object) -> list[int]:
    """What transformers generates greedily. Its guidance runs the model beside the one it steers."""
    ids, negative = torch.tensor([list(prompt)]), guidance.get("negative_prompt")
    output = oracle(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        guidance_scale=guidance.get("guidance_scale"),
        negative_prompt_ids=None if negative is None else torch.tensor([negative]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()


def run(llm: LLM, params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]] = PROMPTS) -> list:
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def guided_logprobs(family: str, prompt: Sequence[int], tokens: Sequence[int], guidance: dict) -> torch.Tensor:
    """From transformers' logits, of what comes at the place of each of `tokens`."""

    def after(context: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = oracle(family)(torch.tensor([[*context, *tokens]])).logits[0]
        return logits[len(context) - 1 : -1].log_softmax(-1)

    conditional, negative = after(prompt), after(guidance.get("negative_prompt", prompt[-1:]))
    return (guidance.get("guidance_scale", 1.0) * (conditional - negative) + negative).log_softmax(-1)


def check_logprobs(family: str, prompt: Sequence[int], output: CompletionOutput, guidance: dict) -> None:
    expected = guided_logprobs(family, prompt, output.token_ids, guidance)
    for at, entry in zip(expected, output.logprobs, strict=True):
        for token, reported in entry.items():
            assert reported.logprob == pytest.approx(at[token].item(), abs=TOLERANCE)


def check_left_clean(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert scheduler.cache.pool.free_pages == scheduler.cache.pool.num_pages
    assert scheduler.slots.num_free == scheduler.config.max_num_seqs


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_guided_requests_are_transformers_among_unguided_ones(family: str, open_llm) -> None:
    """Chunks of prompts, few slots, prefixes found: in the second round by prompts and negative prompts alike."""
    llm, params = open_llm(family, **TIGHT), [GREEDY.replace(**guidance, logprobs=2) for guidance in GUIDANCE]
    plain = run(llm, [GREEDY] * len(PROMPTS))
    expected = [generated(family, prompt, guidance) for prompt, guidance in zip(PROMPTS, GUIDANCE, strict=True)]
    for _ in range(2):
        results = run(llm, params)
        for result, guidance, wanted, free in zip(results, GUIDANCE, expected, plain, strict=True):
            [output] = result.outputs
            assert output.token_ids == wanted
            assert (wanted != free.outputs[0].token_ids) == bool(guidance)
            check_logprobs(family, result.prompt_token_ids, output, guidance)
            assert output.metrics.prompt_tokens == len(result.prompt_token_ids)
            assert output.metrics.output_tokens == 12
    check_left_clean(llm)


@pytest.mark.dealt
@pytest.mark.parametrize(
    "family",
    [
        family if family == "qwen3_5" else pytest.param(family, marks=pytest.mark.thorough)
        for family in tiny_models.RECURRENT
    ],
)
def test_guidance_of_models_with_states_is_that_of_transformers_logits(family: str, open_llm) -> None:
    """Each token against what both contexts give after all tokens before it, since the caches of transformers' own
    guidance are wrong for some of these models. In the second round both contexts go on from kept states."""
    llm, params = open_llm(family, **TIGHT), [GREEDY.replace(**guidance, logprobs=2) for guidance in GUIDANCE]
    plain = run(llm, [GREEDY] * len(PROMPTS))
    for _ in range(2):
        changed = 0
        for result, free, guidance in zip(run(llm, params), plain, GUIDANCE, strict=True):
            [output] = result.outputs
            check_logprobs(family, result.prompt_token_ids, output, guidance)
            scores = guided_logprobs(family, result.prompt_token_ids, output.token_ids, guidance)
            chosen = scores.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            assert (chosen >= scores.amax(1) - TOLERANCE).all()
            changed += output.token_ids != free.outputs[0].token_ids
        assert changed >= 4, "guidance that changes nothing shows nothing"
    assert llm.engine.scheduler.cache.hit_tokens > 0
    check_left_clean(llm)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.usefixtures("crowded")
def test_preemption_changes_nothing(policy: str, open_llm) -> None:
    guidance, prompts = {"guidance_scale": 1.5, "negative_prompt": list(range(100, 120))}, PROMPTS[:6]
    settings = {**TIGHT, "max_num_seqs": 6, "scheduling_policy": policy}
    layout = open_llm("mixed", **settings).assembly.memory.layout
    pages = 1 + layout.pages_needed(31 + 40, 16) + layout.pages_needed(20 + 40, 16)  # the longest pair alone
    llm = open_llm("mixed", **settings, kv_cache_memory=pages * layout.page_bytes)
    results = run(llm, [GREEDY.replace(**guidance, max_tokens=40)] * len(prompts), prompts)
    for result in results:
        [output] = result.outputs
        scores = guided_logprobs("mixed", result.prompt_token_ids, output.token_ids, guidance)
        assert output.token_ids == scores.argmax(1).tolist()
    assert sum(result.outputs[0].metrics.preemptions for result in results) > 0
    check_left_clean(llm)


def test_penalties_and_bad_words_come_after_guidance_as_in_transformers(open_llm) -> None:
    llm, guidance = open_llm("llama", **TIGHT), GUIDANCE[0]
    free = generated("llama", PROMPTS[0], guidance)
    for ours, theirs in (
        ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        ({"bad_words": [[free[0]], free[2:4]]}, {"bad_words_ids": [[free[0]], free[2:4]]}),
    ):
        [result] = run(llm, [GREEDY.replace(**guidance, **ours)], PROMPTS[:1])
        assert result.outputs[0].token_ids == generated("llama", PROMPTS[0], guidance, **theirs)
        assert result.outputs[0].token_ids != free


class OnlyParities(transformers.LogitsProcessor):
    """What `Alternating` allows after a prompt of `start` tokens."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wrong = torch.arange(tiny_models.VOCAB) % 2 != (input_ids.shape[1] - self.start) % 2
        return scores.masked_fill(wrong, -torch.inf)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_guided_request_obeys_its_token_mask(tiny_model: Callable[[str], Path], lookahead: int) -> None:
    guidance, prompt = GUIDANCE[0], PROMPTS[0]
    with rig(tiny_model("qwen3")) as own:
        masked = ask("x", prompt, max_tokens=12, mask=Alternating(), lookahead=lookahead, **guidance)
        broken = ask("z", prompt, mask=Alternating("allowed"), **guidance)
        outcomes = own.run(masked, ask("y", prompt, max_tokens=12, lookahead=lookahead, **guidance), broken)
    assert parities(outcomes["x"].tokens) == [0, 1] * 6
    only = transformers.LogitsProcessorList([OnlyParities(len(prompt))])
    assert outcomes["x"].tokens == generated("qwen3", prompt, guidance, logits_processor=only)
    assert outcomes["y"].tokens == generated("qwen3", prompt, guidance)
    assert (outcomes["z"].finish_reason, len(outcomes["z"].tokens)) == ("error", 2)


def test_tokens_are_drawn_as_often_as_the_guided_scores_say(open_llm) -> None:
    """Of the four likeliest, 640 draws: each count within four standard deviations of transformers' share."""
    llm, prompt, negative = open_llm("llama", max_num_seqs=32, block_size=4), [5, 6, 7], [50, 51]
    params = SamplingParams(
        temperature=2.0, top_k=4, max_tokens=1, n=128, guidance_scale=1.5, negative_prompt=negative, ignore_eos=True
    )
    results = run(llm, [params.replace(seed=seed) for seed in range(5)], [prompt] * 5)
    drawn = [output.token_ids[0] for result in results for output in result.outputs]
    with torch.inference_mode():
        plain = oracle("llama")(torch.tensor([prompt])).logits[:, -1]
        process = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(
            1.5, oracle("llama"), torch.tensor([negative])
        )
        share, ids = (process(torch.tensor([prompt]), plain)[0] / 2).topk(4)
    for token, p in zip(ids.tolist(), share.softmax(0).tolist(), strict=True):
        assert abs(drawn.count(token) - 640 * p) < 4 * (640 * p * (1 - p)) ** 0.5
    assert set(drawn) <= set(ids.tolist())


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(open_llm) -> None:
    """And guided neighbours change nothing for others. Logprobs are of the guided scores at any temperature."""
    drawn = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=12, seed=7, n=2, logprobs=1, ignore_eos=True)
    params = [drawn.replace(**guidance) for guidance in GUIDANCE]
    alone = open_llm("llama", block_size=16)
    expected = [run(alone, [each], [prompt])[0] for each, prompt in zip(params, PROMPTS, strict=True)]
    for result, wanted, guidance in zip(run(open_llm("llama", **TIGHT), params), expected, GUIDANCE, strict=True):
        tokens = [output.token_ids for output in result.outputs]
        assert tokens == [output.token_ids for output in wanted.outputs]
        assert tokens[0] != tokens[1]
        check_logprobs("llama", result.prompt_token_ids, result.outputs[1], guidance)


def test_stops_prompt_logprobs_and_leaving_early(open_llm) -> None:
    llm, guidance, prompt = open_llm("llama", **TIGHT), GUIDANCE[0], PROMPTS[4]
    free = generated("llama", prompt, guidance)
    stop = next(token for token in free[4:] if token not in free[:4])
    params = GREEDY.replace(**guidance, stop_token_ids=[stop], prompt_logprobs=0)
    guided, plain = run(llm, [params, GREEDY.replace(prompt_logprobs=0)], [prompt] * 2)
    assert guided.outputs[0].token_ids == free[: free.index(stop) + 1]
    assert guided.outputs[0].finish_reason == "stop"
    assert [entry[token].logprob for entry, token in zip(guided.prompt_logprobs[1:], prompt[1:], strict=True)] == [
        pytest.approx(entry[token].logprob, abs=TOLERANCE)
        for entry, token in zip(plain.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    stream = llm.stream({"prompt_token_ids": prompt}, GREEDY.replace(**guidance))
    assert next(stream).token_ids == free[:1]
    stream.close()
    check_left_clean(llm)


def test_steps_as_small_as_a_pair_are_enough(tiny_model: Callable[[str], Path]) -> None:
    """A device with memory for two tokens a step."""
    with rig(tiny_model("llama")) as own:
        forward = own.runner.forward

        def cramped(plan):
            if plan.num_tokens > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(plan)

        own.runner.forward = cramped  # type: ignore[method-assign]
        guided = [ask(f"g{i}", PROMPTS[i], max_tokens=12, **GUIDANCE[i]) for i in (0, 4)]
        outcomes = own.run(ask("a", PROMPTS[0]), *guided)
        assert own.errors
    assert [outcomes[f"g{i}"].tokens for i in (0, 4)] == [generated("llama", PROMPTS[i], GUIDANCE[i]) for i in (0, 4)]


def test_a_neighbours_float32_changes_no_draw() -> None:
    """Scores beside a guided row become float32, and bfloat16 ones must be drawn from in the same way without it."""
    logits_RV = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    tables = SamplingTables.empty(1, 8, torch.device("cpu"))
    tables.temperature_S.fill_(1)
    slots_R, position_R = torch.zeros(4096, dtype=torch.int64), torch.arange(4096)
    found = [
        torch_ops.sample(each, tables, slots_R, position_R, Feature.RANDOM) for each in (logits_RV, logits_RV.float())
    ]
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": 101.0}, "guidance_scale"),
        ({"guidance_scale": "2"}, "guidance_scale"),
        ({"guidance_scale": None}, "guidance_scale"),
        ({"negative_prompt": [5]}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": []}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": [-1]}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": [True]}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": 5}, "negative_prompt"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**wrong)
    assert raised.value.param == param


def test_negative_prompts_that_do_not_fit_are_refused_and_lengths_are_cut_to_fit(open_llm) -> None:
    llm = open_llm("llama", **TIGHT)
    for wrong in ([10**6], "text", [5] * 96):
        with pytest.raises(InvalidRequest) as raised:
            run(llm, [GREEDY.replace(guidance_scale=2.0, negative_prompt=wrong)], PROMPTS[:1])
        assert raised.value.param == "negative_prompt"
    [result] = run(llm, [GREEDY.replace(guidance_scale=2.0, negative_prompt=[5] * 90)], PROMPTS[:1])
    assert len(result.outputs[0].token_ids) == 6
