"""Most kinds of models that transformers lists run through its modules, at sizes that the tests cut, and the others are
refused by name. docs/models.md lists both."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.assembly.foreign import check_agrees
from ridgeline.core.errors import ModelLoadError
from ridgeline.foreign.spec import foreign_config
from ridgeline.layers.dense import DenseCausal
from tests.devices import placed
from tests.foreign_models import LATE, REFUSED, RUNNING, VOCAB, cut, decoder_of

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
SAMPLE = ("deepseek_v3", "gpt_oss", "gemma2", "ernie")  # latent heads, sinks, soft caps, an encoder's class as decoder
REFUSED_SAMPLE = ("axk2", "falcon", "bart", "hrm_text", "doge", "llama4_text", "qwen3_next")


def sampled(names: object, sample: tuple[str, ...]) -> list[object]:
    return [
        name if name in sample else pytest.param(name, marks=pytest.mark.thorough)
        for name in names  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("model_type", sampled(RUNNING, SAMPLE))
def test_a_kind_of_model_scores_as_its_class_does_by_itself(model_type: str, tmp_path: Path) -> None:
    cut(model_type, **RUNNING[model_type]).built().save_pretrained(tmp_path)
    decoder = decoder_of(tmp_path)
    ids = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(4))  # longer than its window
    expected = decoder.plain_logits(ids)
    for fused in (False, True):
        if fused:
            decoder.prepare()
        check_agrees(decoder)
        with torch.inference_mode():
            found = decoder.logits(decoder(ids, torch.arange(len(ids)), DenseCausal(1)))
        apart_T = (found - expected).abs().amax(1) / expected.abs().max()
        assert (apart_T < 2e-4).sum() >= 23, apart_T  # a rounding may choose between two experts for one of the tokens
        assert bool(len(decoder.swaps)) == fused  # the check has not taken the ops out again
        assert torch.equal(decoder.plain_logits(ids), expected) or fused
    shutil.rmtree(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "eager"), [*((each, False) for each in RUNNING), *((each, True) for each in SAMPLE)], ids=str
)
def test_on_a_gpu_a_kind_of_model_scores_what_it_writes_as_its_class_does(
    model_type: str, eager: bool, tmp_path: Path
) -> None:
    """In chunks, together and behind a prefix that was found, in captured graphs and op by op."""
    model = cut(model_type, **RUNNING[model_type]).built()
    model.save_pretrained(tmp_path)
    prompts = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 17)]
    prompts.append([*prompts[1], 7])
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "skip_tokenizer_init": True}
    apart, cached = list[float](), 0
    with LLM(
        tmp_path, model_impl="transformers", dtype="float32", enforce_eager=eager, **settings, **placed("cuda")
    ) as llm:
        for _ in range(2):
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            for ids, result in zip(prompts, llm.generate(asked, params, use_tqdm=False), strict=True):
                [output] = result.outputs
                cached += output.metrics.cached_tokens
                with torch.inference_mode():
                    scores = model(torch.tensor([[*ids, *output.token_ids]])).logits[0].log_softmax(-1)
                for at, token, entry in zip(scores[len(ids) - 1 :], output.token_ids, output.logprobs, strict=False):
                    wrong = max(abs(entry[token].logprob - at[token].item()), (at.max() - at[token]).item())
                    apart.append(wrong / at.abs().max().item())
    assert cached > 0, "no prefix was found"
    # A rounding may choose between two experts for a few tokens, and some classes' random layers enlarge roundings
    apart.sort()
    assert apart[len(apart) // 2] < 2e-4
    assert apart[len(apart) * 9 // 10] < 2e-3


@pytest.mark.parametrize("model_type", sampled(REFUSED, REFUSED_SAMPLE))
def test_a_kind_of_model_that_cannot_is_refused_by_name(model_type: str) -> None:
    changes, words = REFUSED[model_type]
    kind = cut(model_type, **changes)
    config = getattr(transformers, kind.config)(**kind.values).to_dict()
    with pytest.raises(ModelLoadError, match=words):
        foreign_config({**config, "architectures": [kind.model], "model_type": model_type}, None)


@pytest.mark.parametrize("model_type", sampled(LATE, ("roberta",)))
def test_a_kind_of_model_that_counts_positions_otherwise_fails_the_check(model_type: str, tmp_path: Path) -> None:
    cut(model_type, **LATE[model_type]).built().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="otherwise than by itself"):
        check_agrees(decoder_of(tmp_path))


def test_the_docs_list_both() -> None:
    section = DOCS.read_text().partition("### Kinds of models that were tried")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| runs", "| refused"))]
    listed = {"| runs": list[str](), "| refused": list[str]()}
    for row in rows:
        listed[next(each for each in listed if row.startswith(each))] += re.findall(
            r"`([a-z0-9_-]+)`", row.rpartition(" | ")[2]
        )
    assert sorted(listed["| runs"]) == sorted(RUNNING)
    assert sorted(listed["| refused"]) == sorted([*REFUSED, *LATE])
    assert len(RUNNING) >= 40
