"""What a user may ask for of speculative decoding, and how the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.speculation import Speculation, SuffixRule, speculation_of


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_the_lengths_of_a_lookup_are_vllms(given: dict[str, Any], lookup: tuple[int, int]) -> None:
    for method in ({"method": "ngram"}, {"model": "[ngram]"}):
        found = speculation_of({**method, "num_speculative_tokens": 3, **given})
        assert found == Speculation(
            method="ngram", num_speculative_tokens=3, prompt_lookup_min=lookup[0], prompt_lookup_max=lookup[1]
        )
    assert speculation_of(None) is None


def test_suffix_decoding_is_lookup_with_vllms_defaults() -> None:
    found = speculation_of({"method": "suffix"})
    assert found == Speculation(
        method="ngram",
        num_speculative_tokens=16,
        prompt_lookup_min=1,
        prompt_lookup_max=24,
        lookup_recent_tokens=1_280_000,
        suffix=SuffixRule(factor=1.0, least=0.1),
    )
    assert found.recent_length == 5
    names = {"max_tree_depth": 8, "max_cached_requests": 0, "max_spec_factor": 2, "min_token_prob": 0.5}
    given = {f"suffix_decoding_{name}": value for name, value in names.items()}
    few = speculation_of({"method": "suffix", "num_speculative_tokens": 32, **given})
    assert few is not None
    assert (few.num_drafts, few.looked_up, few.recent_places, few.suffix) == (16, (1, 8), 0, (2.0, 0.5))


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ({"method": "draft_model", "model": "some/hub-id"}, "some/hub-id"),
        ({"method": "draft_model", "model": Path("folder")}, "folder"),
        ({"model": "some/hub-id"}, "some/hub-id"),
        ({"method": "draft_model"}, None),
    ],
)
def test_a_model_alone_is_a_draft_model(given: dict[str, Any], model: str | None) -> None:
    config = LLMConfig(speculative_config={**given, "num_speculative_tokens": 3})
    assert config.speculation == Speculation(method="draft_model", num_speculative_tokens=3, model=model)
    assert (config.num_drafts, config.drafted_ahead) == (3, 3)


@pytest.mark.parametrize(
    ("given", "method", "ahead"),
    [
        ({"method": "eagle", "model": "head"}, "eagle", 3),
        ({"method": "eagle3", "model": "head"}, "eagle3", 3),
        ({"method": "medusa", "model": "head"}, "medusa", 0),
        ({"method": "dflash", "model": "head"}, "dflash", 4),
        ({"method": "dspark", "model": "head"}, "dspark", 4),
        ({"method": "mtp"}, "mtp", 3),
        ({"method": "qwen3_next_mtp"}, "mtp", 3),
        ({"method": "layer_skip"}, "layer_skip", 3),
    ],
)
def test_heads_have_vllms_names(given: dict[str, Any], method: str, ahead: int) -> None:
    config = LLMConfig(speculative_config={**given, "num_speculative_tokens": 3})
    assert config.speculation is not None
    assert (config.speculation.method, config.speculation.model) == (method, given.get("model"))
    assert config.speculation.prompt_lookup_max == 0
    first = speculation_of(
        {**given, "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1, "prompt_lookup_max": 4}
    )
    assert first is not None
    assert (first.method, first.prompt_lookup_min, first.prompt_lookup_max) == (method, 4, 4)
    assert config.drafted_ahead == ahead


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("ngram", "must be an object"),
        ({}, "names no method; supported: ngram, suffix, draft_model, eagle, eagle3, mtp, medusa"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "is 2; give a number from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "is 0; give a whole number from 1 to 64"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "is not for the method suffix; leave it out"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "suffix_decoding_max_tree_depth": 8},
            "is for the method suffix; leave it out",
        ),
        (
            {"method": "layer_skip", "num_speculative_tokens": 3, "skip_layers": [True]},
            "skip_layers of speculative_conf",
        ),
        (
            {"method": "eagle3", "num_speculative_tokens": 3, "confidence_threshold": 0.5},
            "confidence_threshold of speculative_config is for the method dspark; leave it out",
        ),
        ({"method": "dspark", "num_speculative_tokens": 3, "confidence_threshold": 2}, "is 2; give a number from 0 to"),
        ({"method": "suffix_tree", "num_speculative_tokens": 3}, "the method 'suffix_tree', which is not supported"),
        ({"method": "mtp", "num_speculative_tokens": 3, "model": "x"}, "the method mtp needs none; leave it out"),
        ({"method": "eagle", "num_speculative_tokens": 3, "model": 7}, "model of speculative_config is 7; give"),
        ({"method": "medusa", "num_speculative_tokens": 3, "prompt_lookup_min": 65}, "is 65; give a whole number"),
        ({"method": "medusa", "num_speculative_tokens": 3, "skip_layers": [1]}, "is for the method layer_skip; leave"),
        ({"method": "layer_skip", "num_speculative_tokens": 3, "skip_layers": [1, 1]}, "[1, 1]; give a list of layers"),
        ({"method": "layer_skip", "num_speculative_tokens": 3, "skip_layers": "1"}, "'1'; give a list of layers"),
        ({"method": "layer_skip", "num_speculative_tokens": 3, "model": "x"}, "the method layer_skip needs none"),
        ({"method": "eagle", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}, "_parallel_size of spec"),
        ({"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": True}, "_size of speculative_"),
        ({"method": "ngram]", "num_speculative_tokens": 3}, "the method 'ngram]', which is not supported"),
        ({"method": 3}, "the method 3"),
        ({"method": "ngram"}, "num_speculative_tokens of speculative_config is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "is 0; give a whole number from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": 10**9}, "is 1000000000; give a whole number from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "is True"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "is '3'"),
        ({"method": "ngram", "num_spec_tokens": 3}, "has no 'num_spec_tokens'; did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "num_speculative_tokens": 3, "zzz": 1}, "has no 'zzz'; known: method"),
        ({"method": "ngram", "num_speculative_tokens": 3, "model": "draft"}, "needs none; leave it out"),
        ({"method": "draft_model", "num_speculative_tokens": 3, "model": 7}, "model of speculative_config is 7; give"),
        (
            {"method": "eagle", "speculative_token_tree": [[0]], "num_speculative_tokens": True},
            "num_speculative_tokens of speculative_config is True, and speculative_token_tree has 1 nodes",
        ),
        (
            {"method": "lookahead", "num_speculative_tokens": 56.0},
            "num_speculative_tokens of speculative_config is 56.0, and the sizes of lookahead decoding make 56",
        ),
        ({"model": "draft"}, "num_speculative_tokens of speculative_config is missing"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min (5) is above prompt_lookup_max (3)",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 65},
            "prompt_lookup_max of speculative_config is 65",
        ),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": "2"}, "prompt_lookup_min of specul"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "lookup_recent_tokens": 1 << 25},
            "lookup_recent_tokens of speculative_config is 33554432; give a whole number from 0 to 16777216",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "lookup_recent_tokens": -1},
            "is -1; give a whole number from 0",
        ),
        (
            {"method": "layer_skip", "num_speculative_tokens": 3, "lookup_recent_tokens": 4096},
            "lookup_recent_tokens of speculative_config is 4096, and the method layer_skip looks nothing up; set",
        ),
    ],
)
def test_what_is_no_speculation_is_refused_in_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        LLMConfig(speculative_config=given)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("axis", ["pipeline_parallel_size", "prefill_context_parallel_size"])
def test_ranks_that_divide_steps_verify_nothing(axis: str) -> None:
    with pytest.raises(InvalidConfig, match="drafts are verified by ranks that have all tokens yet"):
        LLMConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, **{axis: 2})


@pytest.mark.parametrize(("tokens", "places"), [(0, 0), (1, 4), (1000, 4096), (1024, 4096), (1025, 8192)])
def test_the_table_of_recent_outputs_has_four_places_a_token(tokens: int, places: int) -> None:
    speculation = speculation_of({"method": "ngram", "num_speculative_tokens": 3, "lookup_recent_tokens": tokens})
    assert speculation is not None
    assert (speculation.lookup_recent_tokens, speculation.recent_places) == (tokens, places)
