"""Python code as vLLM's users write it: every argument, field and method of its offline API works or says in one
sentence that it is not here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import ridgeline
from ridgeline import LLM, BeamSearchParams, PoolingParams, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.settings.vllm_arguments import METHODS

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# Names as of vLLM 0.33
SAMPLING = """allowed_token_ids bad_words detokenize extra_args flat_logprobs frequency_penalty ignore_eos
include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n output_kind
presence_penalty prompt_logprob_start prompt_logprob_token_ids prompt_logprobs repetition_detection repetition_penalty
routed_experts_prompt_start seed skip_clone skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens
stop stop_token_ids stream_interval structured_outputs temperature thinking_token_budget top_k top_p
trace_decode_token_ids watermarking"""
POOLING = """dimensions extra_kwargs late_chunking_params late_interaction_params output_kind requires_token_ids
returned_token_ids skip_reading_prefix_cache step_tag_id task use_activation"""
BEAMS = """allowed_token_ids beam_width ignore_eos include_stop_str_in_output length_penalty max_tokens
skip_special_tokens structured_outputs temperature watermarking"""
CALLS = {
    "generate": "prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs",
    "chat": """messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format
        add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs
        mm_processor_kwargs""",
    "encode": "prompts pooling_params use_tqdm lora_request pooling_task tokenization_kwargs",
    "embed": "prompts use_tqdm pooling_params lora_request tokenization_kwargs",
    "classify": "prompts pooling_params use_tqdm lora_request tokenization_kwargs",
    "score": "data_1 data_2 use_tqdm pooling_params lora_request tokenization_kwargs chat_template",
    "beam_search": "prompts params lora_request use_tqdm concurrency_limit priority",
}
RENAMED = {"data_1", "data_2"}


@pytest.mark.parametrize(
    ("kind", "names", "needed"),
    [(SamplingParams, SAMPLING, {}), (PoolingParams, POOLING, {}), (BeamSearchParams, BEAMS, {"beam_width": 2})],
)
def test_every_field_of_vllms_parameters_is_taken_or_refused_by_name(
    kind: Any, names: str, needed: dict[str, Any]
) -> None:
    own = inspect.signature(kind).parameters
    for name in set(names.split()) - own.keys():
        assert kind(**needed, **{name: None}) == kind(**needed), "null asks for nothing"
        try:
            kind(**needed, **{name: 7})
        except InvalidRequest as error:
            assert error.param == name  # noqa: PT017
            assert str(error).startswith(f"{name} is not here: ")  # noqa: PT017
            assert str(error).endswith(".")  # noqa: PT017


def test_fields_with_another_name_here_are_theirs() -> None:
    assert SamplingParams(prompt_logprobs=1, prompt_logprob_start=3).prompt_logprobs_start == 3  # type: ignore[call-arg]
    assert PoolingParams(normalize=False).use_activation is False  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", CALLS)
def test_every_argument_of_vllms_methods_is_taken_or_refused_by_name(method: str, llm: LLM) -> None:
    call = getattr(LLM, method)
    for name in set(CALLS[method].split()) - inspect.signature(call).parameters.keys() - RENAMED:
        try:
            call(llm, **{name: object()})
        except InvalidRequest as error:
            assert str(error).startswith(f"{name} is not here: ")  # noqa: PT017
        except TypeError as error:  # it was taken, and now what must be there is missing
            assert "required" in str(error)  # noqa: PT017


def test_methods_of_vllms_say_what_to_use(llm: LLM) -> None:
    for name in METHODS:
        with pytest.raises(AttributeError, match=rf"^{name} is not here: .*\.$"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        llm.generat  # noqa: B018


def test_nothing_that_is_here_is_said_to_be_absent() -> None:
    assert not [name for name in METHODS if inspect.getattr_static(LLM, name, None) is not None]


def test_prompts_may_be_dictionaries_of_text_or_tokens(llm: LLM) -> None:
    [plain] = llm.generate("the quick", GREEDY)
    text: ridgeline.TextPrompt = {"prompt": "the quick"}
    tokens: ridgeline.TokensPrompt = {"prompt_token_ids": plain.prompt_token_ids}
    both: ridgeline.TokensPrompt = {"prompt": "as it was", "prompt_token_ids": plain.prompt_token_ids}
    found = llm.generate([text, tokens, both], GREEDY)
    assert [each.outputs[0].token_ids for each in found] == [plain.outputs[0].token_ids] * 3
    assert [each.prompt for each in found] == ["the quick", None, "as it was"]
    assert isinstance(found[0], ridgeline.RequestOutput)
    assert isinstance(found[0].outputs[0], ridgeline.CompletionOutput)
    empty: Any = {"prompt": "the quick", "multi_modal_data": None}
    assert llm.generate(empty, GREEDY)[0].outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="sees no pictures"):
        llm.generate({**empty, "multi_modal_data": {"image": 1}}, GREEDY)


def test_a_prompts_own_salt_keeps_it_apart_and_a_reset_forgets_all(llm: LLM) -> None:
    text = "the lazy dog jumps over the other hens and the fox"
    llm.generate(text, GREEDY)

    def cached(**more: Any) -> int:
        [output] = llm.generate({"prompt": text, **more}, GREEDY)
        assert output.outputs[0].metrics is not None
        return output.outputs[0].metrics.cached_tokens

    assert cached() > 0
    assert cached(cache_salt="x") == 0
    assert cached(cache_salt="x") > 0
    assert llm.reset_prefix_cache()
    assert cached() == 0


def test_chats_may_bring_a_template_and_go_on_with_the_last_message(llm: LLM) -> None:
    begun = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    [open_end] = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True, priority=[1])
    assert open_end.prompt_token_ids == llm.get_tokenizer().encode(
        "<|user|>the fox\n<|assistant|>jumps", add_special_tokens=False
    )
    own = "{% for m in messages %}{{ m.content }} {% endfor %}"
    [other] = llm.chat(begun, GREEDY, chat_template=own)
    assert other.prompt_token_ids == llm.get_tokenizer().encode("the fox jumps ", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="cannot both be true"):
        llm.chat(begun, GREEDY, continue_final_message=True)
