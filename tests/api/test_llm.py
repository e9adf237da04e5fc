"""The offline API, used the way vLLM's is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.text.requests import with_spelled_words
from tests import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_text_prompts_come_back_in_order_and_equal_the_oracle(llm: LLM) -> None:
    oracle = tiny_models.build("llama")
    prompts = ["the quick", "brown fox jumps over", "hens"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        with torch.inference_mode():
            ids = oracle.generate(
                torch.tensor([output.prompt_token_ids]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(output.prompt_token_ids) :].tolist()
        assert output.outputs[0].token_ids == ids
        assert output.outputs[0].text == llm.get_tokenizer().decode(ids)
        assert output.outputs[0].finish_reason == "length"


def test_one_prompt_may_be_given_without_a_list(llm: LLM) -> None:
    (alone,) = llm.generate("the quick", GREEDY)
    (ids,) = llm.generate({"prompt_token_ids": alone.prompt_token_ids}, GREEDY)
    assert ids.outputs[0].token_ids == alone.outputs[0].token_ids
    assert ids.prompt is None


def test_stream_joins_to_the_text_of_generate(llm: LLM) -> None:
    (whole,) = llm.generate("the lazy dog", GREEDY)
    pieces = list(llm.stream("the lazy dog", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    assert [i for piece in pieces for i in piece.token_ids] == whole.outputs[0].token_ids
    assert pieces[-1].completion.finish_reason == "length"


def test_streams_can_be_read_in_turn_and_left_early(llm: LLM) -> None:
    expected = {prompt: llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in ("the", "fox")}
    first, second = llm.stream("the", GREEDY), llm.stream("fox", GREEDY)
    texts = {"the": next(first).text, "fox": next(second).text}
    for piece in second:
        texts["fox"] += piece.text
    for piece in first:
        texts["the"] += piece.text
    assert texts == expected
    left = llm.stream("the quick brown", GREEDY)
    next(left)
    left.close()
    assert not llm.engine.scheduler.num_running + llm.engine.scheduler.num_waiting


@pytest.mark.dealt
def test_several_threads_may_ask_at_once(llm: LLM) -> None:
    prompts = [f"{word} {number}" for word in ("the", "fox", "hens") for number in range(4)]
    expected = {prompt: llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in prompts}

    def generated(prompt: str) -> str:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text

    def streamed(prompt: str) -> str:
        return "".join(piece.text for piece in llm.stream(prompt, GREEDY))

    with ThreadPoolExecutor(6) as threads:
        for _ in range(3):
            for ask in (generated, streamed):
                assert dict(zip(prompts, threads.map(ask, prompts, timeout=60), strict=True)) == expected
    assert not llm.engine.has_work


def test_a_stop_string_cuts_the_text_and_frees_the_request(llm: LLM) -> None:
    (whole,) = llm.generate("the other", GREEDY.replace(max_tokens=40))
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (cut,) = llm.generate("the other", GREEDY.replace(max_tokens=40, stop=[stop]))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (kept,) = llm.generate("the other", GREEDY.replace(max_tokens=40, stop=stop, include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_a_stop_token_id_ends_the_request_and_is_named(llm: LLM) -> None:
    (whole,) = llm.generate("the other", GREEDY)
    stop_id = whole.outputs[0].token_ids[5]
    (cut,) = llm.generate("the other", GREEDY.replace(stop_token_ids=[stop_id]))
    length = whole.outputs[0].token_ids.index(stop_id) + 1
    assert cut.outputs[0].token_ids == whole.outputs[0].token_ids[:length]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop_id)


def test_n_completions_share_the_prompt_and_differ(llm: LLM) -> None:
    prompt = "the quick brown fox jumps over the lazy dog, then the hen"
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    (output,) = llm.generate(prompt, params)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert all(c.metrics and c.metrics.cached_tokens > 0 for c in output.outputs[1:])
    (again,) = llm.generate(prompt, params)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_logprobs_name_the_chosen_and_the_likeliest_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("the quick brown fox", params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token in entry
        assert 3 <= len(entry) <= 4
        assert sorted(p.rank for p in entry.values())[:3] == [1, 2, 3]
    chosen = sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(chosen)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_prompt_of_one_token_has_prompt_logprobs_without_a_value(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, n=1, prompt_logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": [5]}, params)
    assert output.prompt_logprobs == [None]
    (output,) = llm.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2))
    assert output.prompt_logprobs is None


def test_logprobs_come_without_text_where_no_text_is_wanted(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate("the quick", params)
    assert output.outputs[0].logprobs
    assert output.prompt_logprobs
    entries = [*output.outputs[0].logprobs, *filter(None, output.prompt_logprobs)]
    assert {each.decoded_token for entry in entries for each in entry.values()} == {None}


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hens"}]
    (output,) = llm.chat(messages, GREEDY)
    text = llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|user|>hens\n<|assistant|>"
    both = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", GREEDY, "prompt"),
        ({"prompt_token_ids": []}, GREEDY, "prompt"),
        ({"prompt_token_ids": [1, 99999]}, GREEDY, "prompt"),
        ({"prompt_token_ids": [1, -1]}, GREEDY, "prompt"),
        ({"prompt_token_ids": [1, "2"]}, GREEDY, "prompt"),
        ({"prompt_token_ids": [5] * 256}, GREEDY, "prompt"),
        ("caf\udce9", GREEDY, "prompt"),
        (7, GREEDY, "prompt"),
        ("hens", SamplingParams(logit_bias={99999: 1.0}), "logit_bias"),
        ("hens", SamplingParams(stop_token_ids=[99999]), "stop_token_ids"),
        ("hens", SamplingParams(stop="x", detokenize=False), "stop"),
    ],
)
def test_a_wrong_prompt_is_one_sentence_and_the_engine_goes_on(
    llm: LLM, prompt: object, params: SamplingParams, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["the quick", prompt], params)  # type: ignore[list-item]
    assert caught.value.param == param
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_work
    assert llm.generate("the quick", GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": 2.0},
        {"n": 0},
        {"n": 1000},
        {"n": 2, "temperature": 0.0},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"min_tokens": 20, "max_tokens": 10},
        {"logprobs": -2},
        {"stop": ""},
        {"stop": ["x"] * 100},
        {"stop_token_ids": [-1]},
        {"logit_bias": {1: 1000.0}},
        {"logit_bias": {1: float("nan")}},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": "x"},
        {"seed": "x"},
        {"temperature": 1e300},
        {"repetition_penalty": 1e-300},
        {"stop": 5},
        {"stop": {"a": 1}},
        {"stop": "x" * 2000},
        {"stop": "\ud800"},
        {"stop_token_ids": 5},
        {"logit_bias": [1]},
        {"ignore_eos": "yes"},
        {"detokenize": 0},
    ],
)
def test_wrong_sampling_parameters_name_themselves_and_their_value(wrong: dict) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**wrong)
    name = str(caught.value.param)
    assert name in wrong
    assert str(caught.value).startswith(name)
    assert repr(wrong[name]).strip("[]")[:5] in str(caught.value) or name == "logit_bias"


def test_lists_of_params_must_match(llm: LLM) -> None:
    outputs = llm.generate(["the", "fox"], [GREEDY, GREEDY.replace(max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 3]
    with pytest.raises(InvalidRequest, match="2 prompts but 1"):
        llm.generate(["the", "fox"], [GREEDY])


def test_generation_config_gives_the_defaults(copy_of: object) -> None:
    folder: Path = copy_of()  # type: ignore[operator]
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 7, "eos_token_id": [2, 5]}')
    with LLM(folder, device="cpu") as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.3, 7)
        assert llm.engine.has_work is False


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        LLM("x", tensor_paralel_size=2)


def test_a_text_and_its_continuation_are_scored_as_they_are_tokenized_together(llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    prompts, continuations = ["the quick brown", "the quick brown "], [[" fox", " hens jump"], ["fox"]]
    found = llm.score(prompts, continuations, use_tqdm=False)
    whole, start = encode("the quick brown fox"), len(encode("the quick brown"))
    by_ids = llm.score({"prompt_token_ids": whole[:start]}, [[whole[start:]]], use_tqdm=False)
    scores = [found[0][0], found[1][0], by_ids[0][0]]  # of which the last found all but a token in the cache
    assert [score.token_ids for score in scores] == [whole[start:]] * 3
    assert [score.logprobs for score in scores] == [pytest.approx(scores[0].logprobs, abs=1e-5)] * 3
    assert found[0][1].token_ids == encode("the quick brown hens jump")[start:]


def test_a_bad_word_may_be_white_space(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    for word, texts in (("\n", ["\n", " \n"]), ("  fox", ["fox", " fox"]), (" ", [" ", "  "])):
        spelled = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        found = with_spelled_words(SamplingParams(bad_words=[word]), tokenizer).bad_words
        assert found == [ids for i, ids in enumerate(spelled) if ids and ids not in spelled[:i]]


def test_bad_words_as_text_come_neither_alone_nor_after_a_space(llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [free] = llm.generate("the quick", params, use_tqdm=False)
    word = llm.get_tokenizer().decode(free.outputs[0].token_ids[3:5]).strip()
    spelled = [encode(word, add_special_tokens=False), encode(f" {word}", add_special_tokens=False)]
    [by_text] = llm.generate("the quick", params.replace(bad_words=[word]), use_tqdm=False)
    [by_ids] = llm.generate("the quick", params.replace(bad_words=spelled), use_tqdm=False)
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    written = [[*free.prompt_token_ids, *by_text.outputs[0].token_ids]]
    for ids in spelled:
        assert not any(row[i : i + len(ids)] == ids for row in written for i in range(len(row)))


def test_a_negative_prompt_as_text_is_encoded_as_a_prompt_is(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, guidance_scale=2.0)
    ids = llm.get_tokenizer().encode("the lazy dog")
    [by_text] = llm.generate("the quick", params.replace(negative_prompt="the lazy dog"), use_tqdm=False)
    [by_ids] = llm.generate("the quick", params.replace(negative_prompt=ids), use_tqdm=False)
    [by_none] = llm.generate("the quick", params, use_tqdm=False)
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids != by_none.outputs[0].token_ids
    word = next(llm.get_tokenizer().decode([i]) for i in by_ids.outputs[0].token_ids if i > 300)  # whole words
    [stopped] = llm.generate("the quick", params.replace(negative_prompt=ids, stop=word), use_tqdm=False)
    assert stopped.outputs[0].stop_reason == word
    assert by_ids.outputs[0].text.startswith(stopped.outputs[0].text + word)
    with pytest.raises(InvalidRequest, match="the negative prompt is empty"):
        llm.generate("the quick", params.replace(negative_prompt=""), use_tqdm=False)
