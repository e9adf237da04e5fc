"""`LLM.beam_search` against transformers' `generate(num_beams=…)`, and the memory that beams share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, BeamSearchParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.text.beams import BeamSearch
from tests import tiny_models

PROMPTS = [[5, 6, 7], list(range(10, 43))]
EOS = tuple(range(2, 300, 9))  # so many that random models do end

oracle = cache(tiny_models.build)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For the oracle: its products are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(folder: Path, **settings: object) -> LLM:
    options = {"dtype": "float32", "device": "cpu", "debug_checks": True, "block_size": 4, **settings}
    return LLM(folder, **{"max_num_batched_tokens": 64, "max_num_seqs": 8, "skip_tokenizer_init": True, **options})


def as_prompts(prompts: list[list[int]]) -> list[dict]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def by_transformers(
    family: str, prompt: list[int], params: BeamSearchParams, eos: list[int] | None
) -> list[tuple[list[int], float]]:
    """(tokens, score) of all beams, the best first."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = oracle(family).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            use_cache=family not in tiny_models.RECURRENT,  # its states of Mamba-2 do not follow their beams
        )
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    tokens = [row[len(prompt) :][:n].tolist() for row, n in zip(found.sequences, lengths, strict=True)]
    return list(zip(tokens, found.sequences_scores.tolist(), strict=True))


CASES = [
    ("llama", BeamSearchParams(beam_width=4, max_tokens=12, stop_token_ids=EOS)),
    ("llama", BeamSearchParams(beam_width=3, max_tokens=12, stop_token_ids=EOS, early_stopping=True)),
    ("llama", BeamSearchParams(beam_width=4, max_tokens=12, stop_token_ids=EOS, early_stopping="never")),
    ("qwen3", BeamSearchParams(beam_width=4, max_tokens=12, stop_token_ids=EOS, length_penalty=-1.5)),
    ("mixed", BeamSearchParams(beam_width=5, max_tokens=10, ignore_eos=True, length_penalty=0.0)),
    ("mistral", BeamSearchParams(beam_width=3, max_tokens=12, stop_token_ids=EOS, length_penalty=2.0)),
    (
        "gpt2",
        BeamSearchParams(beam_width=3, max_tokens=10, stop_token_ids=EOS, early_stopping="never", length_penalty=0.0),
    ),
    *(
        pytest.param(
            family,
            BeamSearchParams(beam_width=3, max_tokens=10, stop_token_ids=EOS),
            marks=() if family in ("qwen3_5", "falcon_h1") else pytest.mark.thorough,
        )
        for family in tiny_models.RECURRENT
    ),
]


@pytest.mark.parametrize(("family", "params"), CASES)
def test_beams_are_transformers(family: str, params: BeamSearchParams, tiny_model: Callable[[str], Path]) -> None:
    """float32 on logits of order ten: 1e-4 is a hundred roundings. A length penalty below 0 makes scores large: then a
    few roundings of theirs (1e-6) are more."""
    eos = sorted({*params.stop_token_ids, *(() if params.ignore_eos else [2])}) or None
    with opened(tiny_model(family)) as llm:
        results = llm.beam_search(as_prompts(PROMPTS), params)
        pool = llm.engine.scheduler.cache.pool
        assert pool.free_pages == pool.num_pages
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = by_transformers(family, prompt, params, eos)
        assert [output.token_ids for output in result.outputs] == [tokens for tokens, _ in expected]
        assert [output.score for output in result.outputs] == pytest.approx(
            [s for _, s in expected], abs=1e-4, rel=1e-6
        )
        for output in result.outputs:
            assert output.finish_reason == ("stop" if output.token_ids[-1] in (eos or ()) else "length")


def test_the_cases_end_beams_early_and_late(tiny_model: Callable[[str], Path]) -> None:
    """Else the comparison above would say little about length penalties and stopping."""
    lengths = set()
    with opened(tiny_model("llama")) as llm:
        for _, params in CASES[:3]:
            for result in llm.beam_search(as_prompts(PROMPTS), params):
                lengths |= {len(output.token_ids) for output in result.outputs}
    assert len(lengths) >= 4


@pytest.mark.parametrize("family", ["llama", "mixed", "mistral"])
def test_beams_hold_what_they_share_once_and_run_a_token_a_step(family: str, tiny_model: Callable[[str], Path]) -> None:
    """A prompt of 60 tokens in blocks of 4, 4 beams of 8 tokens. Beams share the prompt's 15 blocks; on its own each
    holds at most those of 8 tokens."""
    width, size = 4, 4
    params = BeamSearchParams(beam_width=width, max_tokens=8, ignore_eos=True)
    with opened(tiny_model(family), block_size=size) as llm:
        pool, held, ran, step = llm.engine.scheduler.cache.pool, [], [], llm.engine.step

        def watching() -> object:
            llm.engine.fill()
            held.append(pool.num_pages - pool.free_pages)
            events = step()
            ran.append(llm.engine.last_plan.num_tokens)
            return events

        llm.engine.step = watching  # type: ignore[method-assign]
        llm.beam_search(as_prompts([list(range(10, 70))]), params)
    assert max(held) <= (60 // size + width * (8 // size)) * len(llm.engine.layout.groups)
    assert ran == [60] + [width] * 7


def test_beams_survive_a_cache_too_small_for_them(tiny_model: Callable[[str], Path]) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10, stop_token_ids=EOS)
    with opened(tiny_model("llama")) as roomy, opened(tiny_model("llama"), max_num_seqs=1) as tight:
        expected = roomy.beam_search(as_prompts(PROMPTS), params)
        found = tight.beam_search(as_prompts(PROMPTS), params)
    tokens = [[output.token_ids for output in result.outputs] for result in found]
    assert tokens == [[output.token_ids for output in result.outputs] for result in expected]


def test_what_cannot_be_searched_is_refused_before_anything_runs(tiny_model: Callable[[str], Path]) -> None:
    params = BeamSearchParams(beam_width=2)
    many = BeamSearchParams(beam_width=64, stop_token_ids=tuple(range(3, 43)))
    with opened(tiny_model("llama")) as llm:
        for prompts, asked in (
            ([[5], [7] * 300], params),
            ([[]], params),
            ([[5]], 4),
            ([[5]], many),
            ([[10**6]], params),
        ):
            with pytest.raises(InvalidRequest):
                llm.beam_search(as_prompts(prompts), asked)  # type: ignore[arg-type]
            assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping"),
        ({"beam_width": 2, "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"beam_width": 2, "stop_token_ids": 5}, "stop_token_ids"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        BeamSearchParams(**wrong)
    assert raised.value.param == param


@pytest.mark.parametrize(("last", "goes_on"), [(-0.85, True), (-1.4, False)])
def test_a_search_ends_when_the_best_beam_would_rank_below_all_that_ended(last: float, goes_on: bool) -> None:
    """Token 9 ends. One sequence has after a token the score -1, one after two the score -1.9 / 2; the best beam has
    by then the logprob -1.1 + last."""
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=10), {9}, 10)
    search.advance([{9: -1.0, 1: -1.1, 2: -5.0}])
    search.advance([{9: -0.8, 3: last}, {3: -1.0, 9: -2.0}])
    assert [ended.score for ended in search.ended] == pytest.approx([-0.95, -1.0])
    assert bool(search.running) == goes_on == ((-1.1 + last) / 2 > -1.0)
