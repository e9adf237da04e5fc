"""End to end against transformers, in float32 with debug checks on: same tokens, same logprobs, whatever the engine's
settings, whatever else runs, whatever the cache holds.

float32 on logits of order ten: 1e-4 is a hundred roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.text.outputs import CompletionOutput, RequestOutput
from ridgeline.worker.state import expanding, latent
from tests import tiny_models

TOLERANCE = 1e-4
SHARED = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83]
PROMPTS = ([5], [5, 6, 7], [9] * 40 + [3], list(range(10, 75)), SHARED, [*SHARED, 100, 101], [*SHARED, 100, 102, 103])

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

SPOKEN = ("qwen3_5", "lfm2", "falcon_h1", "mamba", "bamba", "rwkv")  # a kind of state each
# windows between full attention; learned positions; slopes; sinks in a mixture; keys of two sizes; latents; states
KINDS = ("llama", "mixed", "gpt2", "bloom", "gpt_oss", "gemma4_moe", "deepseek_v3", "zamba2", *SPOKEN)

Settings = dict[str, object]

# Small steps, small blocks, few slots: chunks, ragged batches and waiting all happen.
TIGHT: Settings = {"max_num_batched_tokens": 24, "block_size": 4, "max_num_seqs": 4}
ROOMY: Settings = {"max_num_batched_tokens": 512, "block_size": 16, "max_num_seqs": 8}


def thorough(value: object, unless: bool) -> object:
    return value if unless else pytest.param(*value, marks=pytest.mark.thorough)  # type: ignore[misc]


@pytest.fixture
def open_llm(tiny_model: Callable[[str], Path]):
    """`open_llm(family, **settings)`: an LLM that is shut down when the test ends."""
    opened: list[LLM] = []

    def build(family: str, **settings: object) -> LLM:
        options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "debug_checks": True, **settings}
        if options["device"] == "cuda":
            options.setdefault("kv_cache_memory", 1 << 24)  # not the whole GPU for a tiny model
        opened.append(LLM(tiny_model(family), **options))
        return opened[-1]

    yield build
    for llm in opened:
        llm.shutdown()


oracle = cache(tiny_models.build)


class Oracle:
    """The logprobs of one family. A model takes hardly longer for many sequences than for one, so it is given together
    what a test then asks for, filled up behind with tokens that no sequence sees."""

    def __init__(self, family: str) -> None:
        self._model = oracle(family)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def read(self, sequences: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, sequences))
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*each, *[0] * (longest - len(each))] for each in sequences])).logits
        self._known = {
            tuple(each): row[: len(each)].log_softmax(-1) for each, row in zip(sequences, logits, strict=True)
        }

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        asked = tuple(tokens)
        if not any(known[: len(asked)] == asked for known in self._known):
            self.read([asked])
        return next(x for known, x in self._known.items() if known[: len(asked)] == asked)[: len(asked)]


oracle_of = cache(Oracle)


def oracle_logprobs(family: str, tokens: Sequence[int]) -> torch.Tensor:
    return oracle_of(family).logprobs(tokens)


def read_texts(family: str, results: Sequence[RequestOutput]) -> None:
    """Let the oracle read at once what is checked next."""
    oracle_of(family).read([[*r.prompt_token_ids, *o.token_ids] for r in results for o in r.outputs])


def run(llm: LLM, prompts: Sequence[Sequence[int]], params: object, **options: object) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False, **options)


def check_output(family: str, prompt: Sequence[int], output: CompletionOutput) -> None:
    """Every reported logprob and rank is the oracle's."""
    expected = oracle_logprobs(family, [*prompt, *output.token_ids])
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        at = expected[len(prompt) - 1 + i]
        assert token in entry
        for candidate, reported in entry.items():
            assert reported.logprob == pytest.approx(at[candidate].item(), abs=TOLERANCE)
            assert (at > at[candidate] + TOLERANCE).sum() < reported.rank <= 1 + (at >= at[candidate] - TOLERANCE).sum()


def check_prompt(family: str, result: RequestOutput) -> None:
    prompt, entries = list(result.prompt_token_ids), result.prompt_logprobs
    expected = oracle_logprobs(family, prompt)
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position in range(1, len(prompt)):
        reported = entries[position][prompt[position]].logprob
        assert reported == pytest.approx(expected[position - 1, prompt[position]].item(), abs=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_logprobs_of_prompts_and_outputs_are_transformers(family: str, device: str, open_llm) -> None:
    llm = open_llm(family, **TIGHT, device=device)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    results = run(llm, PROMPTS, greedy.replace(prompt_logprobs=1))
    read_texts(family, results)
    for result in results:
        check_prompt(family, result)
        check_output(family, result.prompt_token_ids, result.outputs[0])
    again = run(llm, PROMPTS, greedy)
    assert sum(result.outputs[0].metrics.cached_tokens for result in again) > 0, "no prefix was found"
    for result in again:
        check_output(family, result.prompt_token_ids, result.outputs[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "family", [family if family in KINDS else thorough((family,), unless=False) for family in tiny_models.FAMILIES]
)
def test_greedy_tokens_are_transformers_for_64_steps(family: str, device: str, open_llm) -> None:
    llm = open_llm(family, **TIGHT, device=device)
    results = run(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    read_texts(family, results)
    for result in results:
        tokens = [*result.prompt_token_ids, *result.outputs[0].token_ids]
        expected = oracle_logprobs(family, tokens[:-1])[-64:]  # teacher forced: each token follows its past
        chosen = expected.gather(1, torch.tensor(tokens[-64:])[:, None])[:, 0]
        assert (chosen >= expected.amax(1) - TOLERANCE).all()  # the best one, or as good as it


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mixed", "gpt2", "gpt_oss", "gemma4_moe"])
def test_bfloat16_on_a_gpu_stays_near_the_oracle(family: str, open_llm) -> None:
    """Logits are of order ten, so one rounding is 0.04; a few of them add up on the way through the layers. In a
    mixture a rounding can also send a token to another expert, as it does in transformers: there one in twenty may be
    far off."""
    llm = open_llm(family, **TIGHT, device="cuda", dtype="bfloat16")
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
    errors = []
    for result in run(llm, PROMPTS, params):
        [output] = result.outputs
        expected = oracle_logprobs(family, [*result.prompt_token_ids, *output.token_ids])[-33:-1]
        for at, token, entry in zip(expected, output.token_ids, output.logprobs, strict=True):
            errors.append(abs(entry[token].logprob - at[token].item()))
    assert sorted(errors)[len(errors) // 2] < 0.05
    far = [error for error in errors if error >= 0.5]
    assert len(far) <= (len(errors) // 20 if hasattr(oracle(family).config, "num_experts_per_tok") else 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3", "kimi_linear"])
def test_logprobs_are_transformers_where_latents_of_long_rows_are_expanded(
    family: str, device: str, open_llm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of three tokens count as long here, and two heads' keys and values of some 40 tokens as much memory, so that
    steps mix both kinds of rows and long ones take turns."""
    steps: list[tuple[int, bool]] = []
    work = latent.PagedLatents._work

    def seen(self: latent.PagedLatents, *given: object) -> latent.Work:
        found = work(self, *given)  # type: ignore[arg-type]
        steps.append((len(found.long), found.batch is not None))
        return found

    monkeypatch.setattr(latent.PagedLatents, "_work", seen)
    monkeypatch.setattr(expanding, "worth_expanding", lambda tokens_R, kv_len_R, **_: tokens_R >= 3)
    monkeypatch.setattr(expanding, "EXPANDED_BYTES", 4096)
    llm = open_llm(family, **TIGHT, device=device)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    for result in run(llm, PROMPTS, params):
        check_prompt(family, result)
        check_output(family, result.prompt_token_ids, result.outputs[0])
    cached = 0
    for result in run(llm, PROMPTS, params.replace(prompt_logprobs=None)):
        cached += result.outputs[0].metrics.cached_tokens
        check_output(family, result.prompt_token_ids, result.outputs[0])
    assert cached > 0, "no prefix was found"
    [alone] = run(llm, [list(range(80, 120))], params)
    check_prompt(family, alone)
    assert {(0, True), (1, True), (1, False)} <= set(steps)
    assert max(long for long, _ in steps) > 1


# ---- nothing else matters -------------------------------------------------------------------------------------------

VARIED = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=0),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=0),
    SamplingParams(temperature=1.3, seed=4, top_k=40, max_tokens=24, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, top_p=0.8, min_p=0.01, max_tokens=20, min_tokens=8, logprobs=0),
    SamplingParams(temperature=0.9, seed=6, repetition_penalty=1.4, presence_penalty=0.5, max_tokens=24, logprobs=0),
    SamplingParams(temperature=0.7, seed=7, frequency_penalty=1.1, logit_bias={5: 4.0, 8: -3.0}, max_tokens=16, n=3),
    SamplingParams(temperature=0, max_tokens=30, logit_bias={0: -50.0}, repetition_penalty=0.8, prompt_logprobs=0),
]


@cache
def _alone(folder: Path) -> list[RequestOutput]:
    """Every prompt by itself, in one piece, without a cache."""
    settings = {**ROOMY, "enable_prefix_caching": False, "dtype": "float32", "device": "cpu"}
    with LLM(folder, skip_tokenizer_init=True, **settings) as llm:
        return [run(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, VARIED, strict=True)]


def check_same(results: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for result, other in zip(results, expected, strict=True):
        for output, wanted in zip(result.outputs, other.outputs, strict=True):
            assert output.token_ids == wanted.token_ids
            assert output.finish_reason == wanted.finish_reason
            for entry, reference in zip(output.logprobs or [], wanted.logprobs or [], strict=True):
                for token, logprob in reference.items():
                    assert entry[token].logprob == pytest.approx(logprob.logprob, abs=TOLERANCE)


SETTINGS: list[Settings] = [
    *({**TIGHT, "block_size": size} for size in (1, 4, 16, 32)),
    *({**TIGHT, "max_num_batched_tokens": chunk} for chunk in (4, 7, 64)),
    {**ROOMY, "max_num_seqs": 1},
    {**TIGHT, "enable_prefix_caching": False},
]


# Settings are the scheduler's: few of them meet other layers.
MET: dict[str, tuple[int, ...]] = {
    **{"llama": (*range(len(SETTINGS)),), "mixed": (0, 5, 8), "qwen3_5": (5,), "qwen2_moe": (5,)},
    **{"falcon_h1": (8,), "rwkv": (0,), "nemotron_h_moe": ()},
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        thorough((family, settings), unless=SETTINGS.index(settings) in MET[family])
        for family in MET
        for settings in SETTINGS
    ],
    ids=str,
)
def test_settings_and_neighbours_change_nothing(
    family: str, settings: Settings, open_llm, tiny_model: Callable[[str], Path]
) -> None:
    llm, expected = open_llm(family, **settings), _alone(tiny_model(family))
    check_same(run(llm, PROMPTS, VARIED), expected)
    check_same(run(llm, PROMPTS[::-1], VARIED[::-1], priority=[3, 1, 2, 0, 5, 4, 6]), expected[::-1])


LIKE_OTHERS = ("olmoe", "deepseek", "glm4_moe", "qwen3_5_moe")  # mixtures, of which others are there


@pytest.mark.parametrize(  # who goes is the policy's
    ("family", "policy"),
    [
        thorough((family, policy), unless=(policy == "fcfs" and family not in LIKE_OTHERS) or family == "mixed")
        for family in (
            *("llama", "mixed", "gpt2", "olmoe", "deepseek", "glm4_moe", "gpt_oss", "gemma4_moe"),
            *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2_moe", "falcon_h1", "nemotron_h_moe"),
        )
        for policy in ("fcfs", "priority")
    ],
)
@pytest.mark.usefixtures("crowded")
def test_preemption_changes_nothing(family: str, policy: str, open_llm, tiny_model: Callable[[str], Path]) -> None:
    settings: Settings = {"max_num_batched_tokens": 16, "block_size": 4, "max_num_seqs": 6, "max_model_len": 96}
    layout = open_llm(family, **settings).assembly.memory.layout
    pages = 1 + layout.pages_needed(96, 16)  # room for one of the longest
    llm = open_llm(family, **settings, kv_cache_memory=pages * layout.page_bytes, scheduling_policy=policy)
    results = run(llm, PROMPTS, VARIED, priority=[3, 1, 2, 0, 5, 4, 6])
    assert sum(output.metrics.preemptions for result in results for output in result.outputs) > 0
    check_same(results, _alone(tiny_model(family)))
    pool = llm.engine.scheduler.cache.pool
    assert pool.free_pages == pool.num_pages


@pytest.mark.parametrize(
    "family",
    ["mixed", "qwen3_next", "rwkv", *(thorough((family,), unless=False) for family in ("qwen3", "lfm2", "mamba2"))],
)
def test_a_long_life_of_shared_prefixes_and_salts_changes_nothing(
    family: str, open_llm, tiny_model: Callable[[str], Path]
) -> None:
    expected = _alone(tiny_model(family))
    llm = open_llm(family, **TIGHT, kv_cache_memory=1 << 20)
    for salt in ("", "a", "", "b", "a"):
        check_same(run(llm, PROMPTS, VARIED, cache_salt=salt), expected)
    scheduler = llm.engine.scheduler
    assert scheduler.cache.hit_tokens > 0
    assert scheduler.slots.num_free == 4
    assert scheduler.cache.pool.free_pages == scheduler.cache.pool.num_pages


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mixed", "mistral", "gemma3", "gpt_oss", "gemma4_moe"),
        *(family if family in SPOKEN else thorough((family,), unless=False) for family in tiny_models.RECURRENT),
    ],
)
def test_a_conversation_that_goes_on_from_within_a_block_is_transformers(family: str, open_llm) -> None:
    """Turn by turn, all turns' tokens but the last from the cache; and the same without it."""
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=3)
    llm = open_llm(family, **{**TIGHT, "block_size": 16})
    plain = open_llm(family, **{**TIGHT, "block_size": 16}, enable_prefix_caching=False)
    said, known = list(SHARED), 0
    for turn in range(5):
        [result], [without] = run(llm, [said], params), run(plain, [said], params)
        assert result.num_cached_tokens == known
        assert without.num_cached_tokens == 0
        check_output(family, said, result.outputs[0])
        assert result.outputs[0].token_ids == without.outputs[0].token_ids
        known = len(said) + 6  # the last token was drawn, and not run
        said += [*result.outputs[0].token_ids, 90 + turn, 91]
    [branch] = run(llm, [[*said[:-5], 99, 98, 97]], params)
    alike = len(said) - 5
    exact = any(group.spec.exact for group in llm.assembly.memory.layout.groups)
    assert branch.num_cached_tokens in (range(len(SHARED), alike + 1) if exact else (alike,))  # where a state is kept
    check_output(family, branch.prompt_token_ids, branch.outputs[0])


def test_a_prefix_is_found_within_its_salt_only(open_llm) -> None:
    llm, params = open_llm("llama", **TIGHT), SamplingParams(max_tokens=1)

    def cached(salt: str) -> int:
        return run(llm, [PROMPTS[3]], params, cache_salt=salt)[0].outputs[0].metrics.cached_tokens

    assert [cached(""), cached("a"), cached("a"), cached("b"), cached("")] == [0, 0, 64, 0, 64]


def test_completions_of_one_prompt_share_its_blocks_and_differ(open_llm) -> None:
    llm = open_llm("llama", **ROOMY)
    [result] = run(llm, [PROMPTS[3]], SamplingParams(n=4, seed=1, temperature=1, max_tokens=12))
    assert sorted(output.metrics.cached_tokens for output in result.outputs) == [0, 64, 64, 64]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 4


# ---- what ends a request --------------------------------------------------------------------------------------------


def test_stop_ids_lengths_and_ignored_ends(open_llm) -> None:
    llm, prompt = open_llm("llama", **TIGHT), PROMPTS[2]

    def complete(**params: object) -> CompletionOutput:
        return run(llm, [prompt], SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}))[0].outputs[0]

    free = complete(ignore_eos=True).token_ids
    first, later = free[0], next(token for token in free[4:] if token not in free[:4])
    assert complete(max_tokens=1).token_ids == [first]
    assert complete(max_tokens=1).finish_reason == "length"
    stopped = complete(stop_token_ids=[later])
    assert stopped.token_ids == free[: free.index(later) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", later)
    assert complete(stop_token_ids=[first]).token_ids == [first]
    assert complete(stop_token_ids=[first], min_tokens=3).token_ids[0] != first
    assert complete(stop_token_ids=[later], ignore_eos=True).token_ids == stopped.token_ids, "only EOS is ignored"


def test_the_end_of_sequence_id_ends_a_request_unless_it_is_ignored_or_too_early(open_llm) -> None:
    llm, eos = open_llm("llama", **TIGHT), 2
    always = SamplingParams(temperature=0, max_tokens=6, logit_bias={eos: 100.0})
    ended, ignored, late = run(
        llm, [[5, 6]] * 3, [always, always.replace(ignore_eos=True), always.replace(min_tokens=4)]
    )
    assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([eos], "stop")
    assert (ignored.outputs[0].token_ids, ignored.outputs[0].finish_reason) == ([eos] * 6, "length")
    assert late.outputs[0].token_ids.index(eos) == 4


def test_logprobs_0_tells_of_the_chosen_token_alone(open_llm) -> None:
    llm = open_llm("llama", **TIGHT)
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=10, ignore_eos=True)
    [none], [zero], [two] = (run(llm, [[5, 6]], params.replace(logprobs=n))[0].outputs for n in (None, 0, 2))
    assert none.token_ids == zero.token_ids == two.token_ids
    assert none.logprobs is None
    assert [list(entry) for entry in zero.logprobs] == [[token] for token in zero.token_ids]
    for token, entry, alone in zip(two.token_ids, two.logprobs, zero.logprobs, strict=True):
        assert 2 <= len(entry) <= 3
        assert entry[token] == alone[token]
