"""Write docs/api-fields.md: every field of the bodies of OpenAI, vLLM, Anthropic, Cohere, Jina, Ollama and llama.cpp,
with what the server does with it.

python -m ridgeline_bench.scripts.api_fields
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from ridgeline.serving.apis.anthropic.bodies import CountMessagesBody, MessagesBody
from ridgeline.serving.apis.kserve.http import GenerateBody, InferBody
from ridgeline.serving.apis.llamacpp.bodies import HARMLESS as LLAMAS_HARMLESS
from ridgeline.serving.apis.llamacpp.bodies import ApplyBody, EmbeddingsBody, InfillBody, LlamaBody
from ridgeline.serving.apis.ollama.bodies import EmbedBody, OldEmbedBody, OllamasChatBody, OllamasGenerateBody, Options
from ridgeline.serving.apis.openai.batches import FORM_SCHEMA
from ridgeline.serving.apis.openai.cohere import CohereEmbedBody
from ridgeline.serving.apis.openai.response_bodies import CountBody, ResponsesBody
from ridgeline.serving.http.absent import ABSENT
from ridgeline.serving.requests.audio import TranscriptionBody, TranslationBody
from ridgeline.serving.requests.batches import BatchBody
from ridgeline.serving.requests.bodies import (
    ChatBody,
    CompletionBody,
    ContentBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    TokenizeChatBody,
    UnloadAdapterBody,
)
from ridgeline.serving.requests.fields import HARMLESS, REFUSED, known_names, refused_by
from ridgeline.serving.requests.pooling import (
    ClassifyBody,
    ClassifyChatBody,
    EmbeddingBody,
    EmbeddingChatBody,
    PoolingBody,
    PoolingChatBody,
    RerankBody,
    ScoreBody,
)

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
OPENAIS_AUDIO = """chunking_strategy file include known_speaker_names known_speaker_references language model prompt
response_format stream temperature timestamp_granularities"""
VLLMS_AUDIO = """file frequency_penalty hotwords language max_completion_tokens min_p model presence_penalty prompt
repetition_penalty response_format seed stream stream_continuous_usage_stats stream_include_usage temperature
timestamp_granularities top_k top_p use_beam_search"""
VLLMS_TRANSLATIONS = """file hotwords max_completion_tokens model prompt response_format seed stream
stream_continuous_usage_stats stream_include_usage temperature use_beam_search"""
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
OLLAMAS = "model format keep_alive logprobs options shift stream think top_logprobs truncate"
OLLAMAS_OPTIONS = """draft_num_predict embedding_only f16_kv frequency_penalty logits_all low_vram main_gpu min_p
mirostat mirostat_eta mirostat_tau num_batch num_ctx num_gpu num_keep num_predict num_thread numa penalize_newline
presence_penalty repeat_last_n repeat_penalty seed stop temperature tfs_z top_k top_p typical_p use_mlock use_mmap
vocab_only"""
LLAMAS = """frequency_penalty grammar ignore_eos json_schema logit_bias min_p n_predict n_probs presence_penalty
repeat_penalty return_tokens seed stop stream temperature top_k top_p typical_p"""
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
    "transcriptions": {
        "OpenAI": frozenset(OPENAIS_AUDIO.split()),
        "vLLM": frozenset(VLLMS_AUDIO.split()),
    },
    "translations": {
        "OpenAI": frozenset(["file", "model", "prompt", "response_format", "temperature"]),
        "vLLM": frozenset(VLLMS_TRANSLATIONS.split()),
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
    "cohere_embed": {
        "Cohere": frozenset(
            [
                "embedding_types",
                "images",
                "input_type",
                "inputs",
                "max_tokens",
                "model",
                "output_dimension",
                "priority",
                "texts",
                "truncate",
            ]
        )
    },
    "tokenize": {
        "vLLM": frozenset(f"{CONVERSATION} model prompt return_token_strs tools".split()),
        "llama.cpp": frozenset(["add_special", "content", "parse_special", "with_pieces"]),
    },
    "detokenize": {"vLLM": frozenset({"model", "tokens"})},
    "load_adapter": {
        "vLLM": frozenset(["base_model_name", "is_3d_lora_weight", "load_inplace", "lora_name", "lora_path"])
    },
    "unload_adapter": {"vLLM": frozenset({"lora_int_id", "lora_name"})},
    "ollama_chat": {"Ollama": frozenset(f"{OLLAMAS} messages tools".split())},
    "ollama_generate": {
        "Ollama": frozenset(f"{OLLAMAS} context height images prompt raw steps suffix system template width".split())
    },
    "ollama_options": {"Ollama": frozenset(OLLAMAS_OPTIONS.split())},
    "ollama_embed": {"Ollama": frozenset(["dimensions", "input", "keep_alive", "model", "options", "truncate"])},
    "ollama_embeddings": {"Ollama": frozenset(["keep_alive", "model", "options", "prompt"])},
    "llama_completion": {"llama.cpp": frozenset(f"{LLAMAS} prompt".split()).union(LLAMAS_HARMLESS)},
    "llama_infill": {
        "llama.cpp": frozenset(f"{LLAMAS} prompt input_extra input_prefix input_suffix".split()).union(LLAMAS_HARMLESS)
    },
    "llama_template": {"llama.cpp": frozenset(["add_generation_prompt", "chat_template_kwargs", "messages", "tools"])},
    "llama_embedding": {"llama.cpp": frozenset(["content", "input"])},
    "infer": {"KServe": frozenset(["id", "inputs", "outputs", "parameters"])},
    "generate": {"Triton": frozenset(["id", "parameters", "text_input"])},
}

# A form has no body of its own; its parts are named `expires_after[seconds]`.
_FORM: dict[str, Any] = FORM_SCHEMA["content"]["multipart/form-data"]["schema"]["properties"]
FileForm = create_model("FileForm", **{name.partition("[")[0]: (Any, None) for name in _FORM})

TranscriptionForm = create_model("TranscriptionForm", __base__=TranscriptionBody, file=(Any, None))
TranslationForm = create_model("TranslationForm", __base__=TranslationBody, file=(Any, None))

PAGE = Path(__file__).parents[2] / "docs" / "api-fields.md"
BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "completions": (CompletionBody,),
    "chat": (ChatBody,),
    "responses": (ResponsesBody,),
    "messages": (MessagesBody,),
    "input_tokens": (CountBody,),
    "count_tokens": (CountMessagesBody,),
    "batches": (BatchBody,),
    "files": (FileForm,),
    "transcriptions": (TranscriptionForm,),
    "translations": (TranslationForm,),
    "embeddings": (EmbeddingBody, EmbeddingChatBody),
    "pooling": (PoolingBody, PoolingChatBody),
    "classify": (ClassifyBody, ClassifyChatBody),
    "score": (ScoreBody,),
    "rerank": (RerankBody,),
    "cohere_embed": (CohereEmbedBody,),
    "tokenize": (TokenizeBody, TokenizeChatBody, ContentBody),
    "detokenize": (DetokenizeBody,),
    "load_adapter": (LoadAdapterBody,),
    "unload_adapter": (UnloadAdapterBody,),
    "ollama_chat": (OllamasChatBody,),
    "ollama_generate": (OllamasGenerateBody,),
    "ollama_options": (Options,),
    "ollama_embed": (EmbedBody,),
    "ollama_embeddings": (OldEmbedBody,),
    "llama_completion": (LlamaBody,),
    "llama_infill": (InfillBody,),
    "llama_template": (ApplyBody,),
    "llama_embedding": (EmbeddingsBody,),
    "infer": (InferBody,),
    "generate": (GenerateBody,),
}
TITLES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "input_tokens": "/v1/responses/input_tokens",
    "count_tokens": "/v1/messages/count_tokens",
    "batches": "/v1/batches",
    "files": "/v1/files",
    "transcriptions": "/v1/audio/transcriptions",
    "translations": "/v1/audio/translations",
    "embeddings": "/v1/embeddings",
    "pooling": "/pooling",
    "classify": "/classify",
    "score": "/score, /v1/score",
    "rerank": "/rerank, /v1/rerank, /v2/rerank",
    "cohere_embed": "/v2/embed",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "load_adapter": "/v1/load_lora_adapter",
    "unload_adapter": "/v1/unload_lora_adapter",
    "ollama_chat": "/api/chat",
    "ollama_generate": "/api/generate",
    "ollama_options": "/api/chat, /api/generate: options",
    "ollama_embed": "/api/embed",
    "ollama_embeddings": "/api/embeddings",
    "llama_completion": "/completion, /completions",
    "llama_infill": "/infill",
    "llama_template": "/apply-template",
    "llama_embedding": "/embedding, /embeddings",
    "infer": "/v2/models/{model}/infer",
    "generate": "/v2/models/{model}/generate, /v2/models/{model}/generate_stream",
}
NOTES = {
    "batches": "Lines of the file are bodies of the endpoint, with its fields.",
    "transcriptions": "A form (`multipart/form-data`); a list comes as `timestamp_granularities[]`\n"
    "([speech.md](speech.md)).",
    "translations": "A form (`multipart/form-data`).",
    "files": "A form (`multipart/form-data`); `expires_after` comes as `expires_after[anchor]` and\n"
    "`expires_after[seconds]`.",
    "infer": "Of a model that generates, `parameters` are the fields of `/v1/completions` without `n`, and\n"
    "`timeout` in microseconds. `binary_data_output` asks for bytes, as `binary_data` of an output does.",
    "generate": "Fields of `/v1/completions`, without `n`, stand in `parameters` or beside it, with `timeout`\n"
    "and with `stop_words` for `stop`. Empty texts ask for nothing.",
}
HEAD = """# Fields of requests

Written by `python -m ridgeline_bench.scripts.api_fields` from the lists that the server itself
reads by (`ridgeline/serving/requests/fields.py` and `ridgeline/serving/requests/bodies.py`).

* *Implemented*: does what it says there.
* *Refused*: 400 that names it, because the answer would not be the one that was asked for. Null,
  and what is empty, zero or false, ask for nothing and are taken.
* *Harmless*: changes nothing of the answer. The header `ridgeline-ignored` names it, and the log
  does once.

A field that none of these APIs has is refused, with the nearest name: most are misspelled, and
`temprature` would leave the temperature at its default without a word. OpenAI refuses it too; vLLM
ignores it, as `--unknown-fields ignore` does here. The header names it then. Routes of Ollama
and llama.cpp always do that, as these servers do.

A route of another server that is not here is answered with 404 and what to use. They are listed at
the end.
"""


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for route, apis in APIS.items():
        bodies = BODIES[route]
        note = [NOTES[route], ""] if route in NOTES else []
        rows = [f"## {TITLES[route]}", "", *note, "| field | of | state | |", "|---|---|---|---|"]
        for name in sorted(frozenset().union(*apis.values(), *map(known_names, bodies))):
            owners = ", ".join(api for api, names in apis.items() if name in names) or "Ridgeline"
            found, remark = state(bodies, name)
            rows.append(f"| `{name}` | {owners} | {found} | {remark} |")
        parts.append("\n".join(rows) + "\n")
    rows = ["## Routes of other servers that are not here", "", "| route | 404 that says |", "|---|---|"]
    rows += [f"| `{route}` | {why}. |" for route, why in ABSENT.items()]
    return "\n".join([*parts, *rows]) + "\n"


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


if __name__ == "__main__":
    PAGE.write_text(page())
