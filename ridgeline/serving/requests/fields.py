"""The fields of OpenAI's, Anthropic's and vLLM's bodies that no body of ours has: refused where they would change the
answer, or accepted as harmless. `examine` reads a body by these lists, and docs/api-fields.md is written from them.

An unknown field is refused, because most are misspelled: `temprature` alone would leave the temperature at its
default without a word. OpenAI refuses it too. vLLM ignores it, and says so at the log's level debug alone;
`--unknown-fields ignore` does that here, and names the field in a header.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.refusals import shortened

LONGEST_NAME = 64  # characters of a name that near ones are looked for


class Refusal(NamedTuple):
    """The sentence for a field that is refused, unless its value is one of `idle`, which ask for nothing."""

    sentence: str
    idle: tuple[object, ...] = ()


# Fields without which the answer would not be the one that was asked for. What is empty or false asks for nothing.
REFUSED: dict[str, Refusal] = {
    "functions": Refusal("functions is not supported; use tools."),
    "function_call": Refusal("function_call is not supported; use tool_choice.", ("none",)),
    "audio": Refusal("audio output is not supported; leave audio out."),
    "modalities": Refusal('modalities may be ["text"] alone: the model writes nothing else.', (["text"],)),
    "service_tier": Refusal("service_tier may be auto or default: there is one tier.", ("auto", "default")),
    "verbosity": Refusal("verbosity is not supported; ask for it in a message.", ("medium",)),
    "web_search_options": Refusal("web search is not supported; leave web_search_options out."),
    "moderation": Refusal("moderation is not supported; leave it out."),
    "logits_processors": Refusal("logits_processors is not supported; leave it out."),
    "watermarking": Refusal("watermarking is not supported; leave it out."),
    "vllm_xargs": Refusal("vllm_xargs is not supported: there are no extensions that would read it."),
    "kv_transfer_params": Refusal("kv_transfer_params is not supported: caches are not handed between servers."),
    "ec_transfer_params": Refusal("ec_transfer_params is not supported: caches are not handed between servers."),
    "routed_experts_prompt_start": Refusal("routed experts are not reported; leave routed_experts_prompt_start out."),
    "thinking_token_budget": Refusal("thinking_token_budget is not supported; leave it out.", (-1,)),
    "return_token_offsets": Refusal("return_token_offsets is not supported; leave it out."),
    "return_weight_versions": Refusal("weights have no versions here; leave return_weight_versions out."),
    "mm_payload": Refusal("mm_payload is not supported: images and sound are not read; leave it out."),
    "return_mm_kwargs": Refusal("return_mm_kwargs is not supported: images and sound are not read; leave it out."),
    **{
        f"guided_{kind}": Refusal(f"guided_{kind} is not supported; use structured_outputs: {{{kind}: …}}.")
        for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
    },
}

# Fields that change nothing of the answer, and why. They are named in the header `ridgeline-ignored`.
HARMLESS: dict[str, str] = {
    "metadata": "for dashboards of the provider",
    "store": "answers are not kept",
    "user": "names a user to the provider",
    "safety_identifier": "names a user to the provider",
    "session_id": "names a conversation to a router; the prefix cache finds what it has in common",
    "prompt_cache_key": "the prefix cache finds its own; cache_salt separates tenants",
    "prompt_cache_retention": "the prefix cache keeps what it has room for",
    "prompt_cache_options": "the prefix cache keeps what it has room for",
    "prediction": "a guess at the answer, which would only make it faster",
    "spaces_between_special_tokens": "the tokenizers' library puts no spaces there either way",
    "media_io_kwargs": "for images and sound, which are refused themselves",
    "mm_processor_kwargs": "for images and sound, which are refused themselves",
    "guided_decoding_backend": "one library does all grammars",
}
# Other servers' names for fields of ours that spelling alone would not find.
RENAMED = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "num_beams": "use_beam_search",
    "do_sample": "temperature",
}

SAMPLED = """frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream stream_options
temperature top_p user"""
VLLMS = """allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos include_stop_str_in_output
kv_transfer_params length_penalty logprob_token_ids min_p min_tokens mm_payload priority prompt_logprobs
repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_token_ids
return_token_offsets return_tokens_as_token_ids return_weight_versions routed_experts_prompt_start session_id
skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
add_special_tokens echo"""
OPENAIS_RESPONSES = """access_programs background background_options context_management conversation image include
input instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls previous_response_id
prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store
stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user"""
VLLMS_RESPONSES = """background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages
frequency_penalty ignore_eos include include_reasoning include_stop_str_in_output input instructions kv_transfer_params
logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload mm_processor_kwargs model
parallel_tool_calls presence_penalty previous_input_messages previous_response previous_response_id priority prompt
prompt_cache_key prompt_cache_options prompt_cache_retention reasoning repetition_penalty request_id return_mm_kwargs
safety_identifier seed service_tier session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids
store stream structured_outputs temperature text tool_choice tools top_k top_logprobs top_p truncation user vllm_xargs
watermarking"""
MESSAGES = """billing_policy cache_control compaction container context_management diagnostics fallback_credit_token
fallbacks inference_geo max_tokens mcp_servers messages metadata model output_config output_format service_tier speed
stop_sequences stream system temperature thinking thread tool_choice tools top_k top_p user_profile_id workspace_id"""
VLLMS_MESSAGES = """cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages metadata
mm_payload model output_config return_mm_kwargs stop_sequences stream system temperature thinking tool_choice tools
top_k top_p vllm_xargs watermarking"""
COUNTED_MESSAGES = """billing_policy cache_control compaction context_management mcp_servers messages model
output_config speed system thinking tool_choice tools user_profile_id workspace_id"""
VLLMS_COUNTED_MESSAGES = "chat_template_kwargs messages model output_config system thinking tool_choice tools"
COUNTED_RESPONSES = """conversation input instructions model parallel_tool_calls personality previous_response_id
reasoning text tool_choice tools truncation"""
CONVERSATION = """add_generation_prompt chat_template chat_template_kwargs continue_final_message media_io_kwargs
messages mm_processor_kwargs add_special_tokens"""
POOLED = """cache_salt mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
use_activation user"""
EMBEDDED = f"{POOLED} {CONVERSATION} dimensions embed_dtype encoding_format endianness input"
COMPARED = f"{POOLED} chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query"
# All fields of these APIs: OpenAI's as of openai-python 2 and 3, Anthropic's as of its versions 2023-06-01 and
# 2026-10-21 with betas, vLLM's as of 0.26 to 0.33 with older names of its own.
APIS: dict[str, dict[str, frozenset[str]]] = {
    "completions": {
        "OpenAI": frozenset(f"{SAMPLED} prompt best_of echo suffix".split()),
        "vLLM": frozenset(
            f"{SAMPLED} {VLLMS} prompt suffix prompt_embeds guided_json guided_regex guided_choice "
            "guided_grammar guided_whitespace_pattern guided_decoding_backend logits_processors".split()
        ),
    },
    "chat": {
        "OpenAI": frozenset(
            f"""{SAMPLED} audio function_call functions max_completion_tokens messages metadata modalities moderation
            parallel_tool_calls prediction prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort
            response_format safety_identifier service_tier store tool_choice tools top_logprobs verbosity
            web_search_options""".split()
        ),
        "vLLM": frozenset(
            f"""{SAMPLED} {VLLMS} messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
            include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
            chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text guided_json guided_regex
            guided_choice guided_grammar guided_whitespace_pattern guided_decoding_backend
            logits_processors""".split()
        ),
    },
    "responses": {
        "OpenAI": frozenset(OPENAIS_RESPONSES.split()),
        "vLLM": frozenset(VLLMS_RESPONSES.split()),
    },
    "messages": {
        "Anthropic": frozenset(MESSAGES.split()),
        "vLLM": frozenset(VLLMS_MESSAGES.split()),
    },
    "input_tokens": {"OpenAI": frozenset(COUNTED_RESPONSES.split())},
    "count_tokens": {
        "Anthropic": frozenset(COUNTED_MESSAGES.split()),
        "vLLM": frozenset(VLLMS_COUNTED_MESSAGES.split()),
    },
    "batches": {
        "OpenAI": frozenset(["completion_window", "endpoint", "input_file_id", "metadata", "output_expires_after"]),
    },
    "files": {"OpenAI": frozenset(["expires_after", "file", "purpose"])},
    "embeddings": {
        "OpenAI": frozenset(["dimensions", "encoding_format", "input", "model", "user"]),
        "vLLM": frozenset(EMBEDDED.split()),
    },
    "pooling": {"vLLM": frozenset(f"{EMBEDDED} task".split())},
    "classify": {"vLLM": frozenset(f"{POOLED} {CONVERSATION} input".split())},
    "score": {"vLLM": frozenset(f"{COMPARED} data_1 data_2 items queries text_1 text_2".split())},
    "rerank": {
        "Cohere": frozenset(["documents", "max_tokens_per_doc", "model", "priority", "query", "top_n"]),
        "Jina": frozenset(["documents", "model", "query", "return_documents", "top_n"]),
        "vLLM": frozenset(f"{COMPARED} query top_n".split()),
    },
    "tokenize": {"vLLM": frozenset(f"{CONVERSATION} model prompt return_token_strs tools".split())},
    "detokenize": {"vLLM": frozenset({"model", "tokens"})},
    "infer": {"KServe": frozenset(["id", "inputs", "outputs", "parameters"])},
    "generate": {"Triton": frozenset(["id", "parameters", "text_input"])},
}


def examine(model: type[BaseModel], data: Mapping[str, Any], *, lenient: bool = False) -> list[str]:
    """Return the fields of a body that are ignored, as dotted paths, sorted. Raise BadRequest for one that is refused,
    or unknown, which `lenient` ignores. Null asks for nothing."""
    ignored: list[str] = []
    _examine(model, data, "", lenient, ignored)
    return sorted(ignored)


def _examine(model: type[BaseModel], data: Mapping[str, Any], path: str, lenient: bool, ignored: list[str]) -> None:
    known, inner, harmless = _shape(model)
    refusals = {**REFUSED, **refused_by(model)} if not path else refused_by(model)
    for name in sorted(data.keys() - known):
        value = data[name]
        if value is None:
            continue
        if name in refusals:
            refused = refusals[name]
            if value and value not in refused.idle:
                raise BadRequest(refused.sentence, param=path + name)
        elif lenient or name in harmless or (not path and name in HARMLESS):
            ignored.append(path + name)
        else:
            raise _unknown(name, path, known)
    for name in inner.keys() & data.keys():
        if isinstance(data[name], Mapping):
            _examine(inner[name], data[name], f"{path}{name}.", lenient, ignored)


def _unknown(name: str, path: str, known: frozenset[str]) -> BadRequest:
    near = [each for each in [RENAMED.get(name)] if each in known] or get_close_matches(name[:LONGEST_NAME], known, 1)
    hint = f"; did you mean {path}{near[0]}?" if near else "; leave it out."
    shown = name if len(name) <= LONGEST_NAME else shortened(name)
    return BadRequest(f"Unrecognized request argument supplied: {path}{shown}{hint}", param=f"{path}{shown}")


@lru_cache
def _shape(model: type[BaseModel]) -> tuple[frozenset[str], dict[str, type[BaseModel]], frozenset[str]]:
    """Return a model's names, its fields that are bodies of their own, and the names it takes as harmless."""
    inner = {}
    for name, field in model.model_fields.items():
        found = [each for each in (field.annotation, *_members(field.annotation)) if _is_checked(each)]
        if found:
            inner[field.alias or name] = found[0]
    return known_names(model), inner, frozenset(getattr(model, "harmless", ()))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def _is_checked(annotation: Any) -> bool:
    """Return True for a model that does not take other fields as they are."""
    return (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and annotation.model_config.get("extra") != "allow"
    )


def refused_by(model: type[BaseModel]) -> Mapping[str, Refusal]:
    """Return the fields that this body refuses, beside those that every body does."""
    return getattr(model, "refused", {})


@lru_cache
def known_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a body's own fields."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def state(models: Sequence[type[BaseModel]], name: str) -> tuple[str, str]:
    """Return the state of a field in the bodies of a route (implemented, refused, harmless), and a remark."""
    if any(name in known_names(model) for model in models):
        return "implemented", ""
    for model in models:
        refused, harmless = {**REFUSED, **refused_by(model)}, getattr(model, "harmless", ())
        if name in refused:
            idle = [repr(value) for value in refused[name].idle]
            return "refused", refused[name].sentence + (f" Taken: {', '.join(idle)}." if idle else "")
        if isinstance(harmless, Mapping) and name in harmless:
            return "harmless", harmless[name]
    return "harmless", HARMLESS[name]
