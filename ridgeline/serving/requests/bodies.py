"""The bodies that clients send, as pydantic models: types and bounds of every field that this server knows.

Names and meanings are OpenAI's, and vLLM's for the fields that OpenAI does not have. `fields.py` says what
becomes of others; null means the default everywhere. `SamplingParams` checks the ranges of sampling parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from ridgeline.core.plan.request import (
    MAX_BAD_WORDS,
    MAX_GUIDANCE,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_NAMED,
    MAX_PATTERN,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
)
from ridgeline.core.plan.transfer import MOST_BUFFER_BYTES, MOST_TENSORS
from ridgeline.core.settings.policies import MOST_SECONDS
from ridgeline.serving.requests.fields import Refusal

MOST_PROMPTS = 512  # in one completions request
MOST_MESSAGES = 4096
MOST_PARTS = 4096  # in a message's content
MOST_TOOLS = 256
MOST_DOCUMENTS = 4096
MOST_CHOICES = 4096
MOST_TOKENS = 1 << 20  # token ids to detokenize, to allow, or in a negative prompt
MOST_ID = 2**32 - 1
MOST_NAME = 256  # characters of a name or a salt
MOST_TEMPLATE = 1 << 18  # characters of a chat template
LONGEST_NUMBER = 32  # characters of a number that came as text
WHOLE, REAL = re.compile(r"[+-]?[0-9]+(\.0*)?"), re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


def texts_or_ids(
    name: str, most: int, largest: int | None = None, *, or_none: bool = False
) -> Callable[[object], object]:
    """Return a check that a value is text, tokens, or a list of at most so many of either. A union's error would speak
    of each of its members, so the check is written out.

    name: what one of them is called, such as "a prompt". largest: the largest token id, if it is bounded here. or_none:
    null is taken, too.
    """
    plural = f"{name.partition(' ')[2]}s"

    def ids(value: object) -> bool:
        return _is_ids(value) and (largest is None or max(value) <= largest)

    def check(value: object) -> object:
        if isinstance(value, str) or ids(value) or (value is None and or_none):
            return value
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name} is text, a list of token ids, or a list of such {plural}")
        if len(value) > most:
            raise ValueError(f"there are {len(value)} {plural}; at most {most} are taken at once")
        if not (all(isinstance(each, str) for each in value) or all(map(ids, value))):
            raise ValueError(f"a list of {plural} holds texts, or lists of token ids that are whole numbers from 0")
        return value

    return check


def _is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


def _check_ids(value: object, check: ValidatorFunctionWrapHandler) -> Any:
    """Check all ids at once if they are right. Checking a million ids one by one would take a tenth of a second."""
    if _is_ids(value) and len(value) <= MOST_TOKENS and max(value) <= MOST_ID:
        return value
    return check(value)


def _check_bias(bias: object) -> object:
    """Check the length of logit_bias first, because each wrong entry would become an error of its own."""
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"there are {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    return bias


def _check_stop(stop: object) -> object:
    if stop is None or isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
        return stop
    raise ValueError("stop is a string or a list of strings")


def _as_whole(value: object) -> object:
    """Return a whole number that came as text or with a point ("5", 5.0), as some clients write it, as a number."""
    if isinstance(value, str) and len(value) <= LONGEST_NUMBER and WHOLE.fullmatch(value):
        return int(value.partition(".")[0])
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_real(value: object) -> object:
    """Return a number that came as text ("0.5") as a number."""
    if isinstance(value, str) and len(value) <= LONGEST_NUMBER and REAL.fullmatch(value):
        return float(value)
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_PROMPTS}
_PROMPTS = [{"type": "string"}, _IDS, _TEXTS, {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MOST_PROMPTS}]
Prompt = Annotated[
    Any, BeforeValidator(texts_or_ids("a prompt", MOST_PROMPTS, or_none=True)), WithJsonSchema({"anyOf": _PROMPTS})
]
Stop = Annotated[
    str | list[str] | None,
    BeforeValidator(_check_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
LAX_INT, LAX = BeforeValidator(_as_whole), BeforeValidator(_as_real)
TokenId = Annotated[int, Field(ge=0, le=MOST_ID)]
TokenIds = Annotated[
    list[TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_TOKENS), WrapValidator(_check_ids)
]
Object = dict[str, Any]
# The OpenAPI document shows these ranges, and `SamplingParams` enforces them for every interface.
Unit = Annotated[float, LAX, WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})]
Share = Annotated[float, LAX, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1})]
Penalty = Annotated[float, LAX, WithJsonSchema({"type": "number", "minimum": -2, "maximum": 2})]
Scale = Annotated[float, LAX, WithJsonSchema({"type": "number", "minimum": -MAX_GUIDANCE, "maximum": MAX_GUIDANCE})]
Penalties = Annotated[float, LAX, WithJsonSchema({"type": "number", "minimum": -100, "maximum": 100})]
NotNegative = Annotated[float, LAX, WithJsonSchema({"type": "number", "minimum": 0})]
Positive = Annotated[float, LAX, WithJsonSchema({"type": "number", "exclusiveMinimum": 0})]
Name = Annotated[str, Field(max_length=MOST_NAME)]
BadText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_STOP_LENGTH)]
TopLogprobs = Annotated[int, Field(ge=-1, lt=2**31), LAX_INT]  # -1 is the whole vocabulary


PromptEmbeds = str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]


class Body(BaseModel):
    """The base of all bodies. A number may come as text ("0.5") and no other value as another's type.

    `harmless` names fields of other servers that a part of a body takes without effect, and may say why. `refused` are
    fields that this body refuses, beside those that every body does. A `lenient` body takes unknown fields without
    effect, as the server whose API it is does; the answer names them.
    """

    lenient: ClassVar[bool] = False
    harmless: ClassVar[Collection[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refusal]] = {}

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class StreamOptions(Body):
    """The options of a stream. With include_usage a last chunk counts tokens, with continuous_usage_stats every chunk
    does."""

    harmless = frozenset({"include_obfuscation"})  # padding against eavesdroppers who count bytes

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())

    harmless = frozenset({"description"})

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for structure, and vLLM's structural tags: `format`, or `structures` with `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: Object | None = None
    structures: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    triggers: Annotated[list[str], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None


class StructuredOutputs(Body):
    """The form that the output must have: exactly one of the first six fields. `json` is a schema, as an object or as
    text, and `structural_tag` a `response_format` of that type as text.

    The others say more of a schema. `whitespace_pattern` is a regular expression for what may stand between values, and
    with `disable_any_whitespace` nothing may. With `disable_additional_properties` objects have the named properties
    alone. With `coerce_one_of` a `oneOf` is taken as `anyOf` where its alternatives may overlap.
    """

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())

    harmless = frozenset({"disable_fallback"})

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    coerce_one_of: bool | None = None


def text_or_objects(name: str, parts: str, most: int) -> Callable[[object], object]:
    """Return a check that a value is text or a list of at most so many objects. A union's error would speak of each of
    its members.

    name, parts: what the value and its objects are called, such as "a content" and "blocks".
    """

    def check(value: object) -> object:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
            raise ValueError(f"{name} is text or a list of {parts}, which are objects")
        if len(value) > most:
            raise ValueError(f"there are {len(value)} {parts}; at most {most} are taken")
        return value

    return check


class RepetitionBody(Body):
    """The end of an output that repeats itself, as `RepetitionDetectionParams`."""

    max_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN), LAX_INT] | None = None
    min_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN), LAX_INT] | None = None
    min_count: Annotated[int, Field(ge=0, lt=2**31), LAX_INT] | None = None


class SampledBody(Body):
    """The fields that every kind of generation takes, whatever its API: the model, how tokens are drawn, and for how
    many seconds the next turn of a session is expected."""

    model: str | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), LAX_INT] | None = None
    min_p: Unit | None = None
    typical_p: Share | None = None
    repetition_penalty: Positive | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_bias)] = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadText | BadIds], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), LAX_INT] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0), LAX_INT] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), LAX_INT] | None = None
    cache_salt: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_ttl: Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    request_id: Name | None = None


class GenerationBody(SampledBody):
    """The fields that OpenAI's two kinds of completions take."""

    n: Annotated[int, Field(ge=1, le=MAX_N), LAX_INT] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), LAX_INT] | None = None
    guidance_scale: Scale | None = None
    negative_prompt: str | TokenIds | None = None
    stop: Stop = None
    detokenize: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    prompt_logprobs_start: Annotated[int, Field(ge=0, lt=2**31), LAX_INT] | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_NAMED)] | None = None
    repetition_detection: RepetitionBody | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    include_breakdown: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: Penalties | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31), LAX_INT] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    slo_ttft_ms: Annotated[float, Field(gt=0, le=1e3 * MOST_SECONDS)] | None = None
    slo_itl_ms: Annotated[float, Field(gt=0, le=1e3 * MOST_SECONDS)] | None = None
    stream_interval: Annotated[int, Field(ge=1, lt=2**31), LAX_INT] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions. `prompt_embeds` holds prompts as vectors: base64 of safetensors files. They
    come before those of `prompt`, which may then be missing or empty."""

    prompt: Prompt = None
    prompt_embeds: PromptEmbeds | None = None
    max_tokens: Annotated[int, Field(ge=0), LAX_INT] | None = None
    logprobs: TopLogprobs | None = None
    suffix: str | None = None


class ChatMessage(Body):
    """A message of a chat.

    The role is system, developer, user, assistant, tool, or another that the template knows. Fields that are not named
    here reach the template too.
    """

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
    content: str | Annotated[list[Object], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None
    tool_calls: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None


class TemplateBody(Body):
    """The fields that decide how a conversation becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_DOCUMENTS)] | None = None
    reasoning_effort: Name | None = None
    continue_final_message: bool | None = None
    media_io_kwargs: Object | None = None
    mm_processor_kwargs: Object | None = None
    chat_template: Annotated[str, Field(max_length=MOST_TEMPLATE)] | None = None


class ChatBody(TemplateBody, GenerationBody):
    """The body of POST /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1), LAX_INT] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1), LAX_INT] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    return_prompt_text: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31), LAX_INT] | None = None  # -1: there is no bound

    _held: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def held(self) -> dict[str, str]:
        """The grammars of the inputs of custom tools, by their names: of texts as they stand within JSON's quotes."""
        return self._held


# what llama.cpp's clients send to POST /tokenize, too
_SPECIALS: Mapping[str, str] = {"parse_special": "special tokens within a text are tokens"}


class TokenizeBody(Body):
    """The body of POST /tokenize with a plain prompt."""

    harmless: ClassVar[Mapping[str, str]] = _SPECIALS

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(TemplateBody):
    """The body of POST /tokenize with a conversation."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class ContentBody(Body):
    """The body of POST /tokenize with llama.cpp's fields."""

    lenient = True
    harmless: ClassVar[Mapping[str, str]] = _SPECIALS

    model: str | None = None
    content: str
    add_special: bool | None = None
    with_pieces: bool | None = None


class LoadAdapterBody(Body):
    """The body of POST /v1/load_lora_adapter."""

    harmless: ClassVar[Mapping[str, str]] = {
        "base_model_name": "the adapter's parent is the model that runs",
        "is_3d_lora_weight": "the file says how its matrices are stored",
    }

    lora_name: Annotated[str, Field(max_length=4096)]
    lora_path: Annotated[str, Field(max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """The body of POST /v1/unload_lora_adapter."""

    harmless: ClassVar[Mapping[str, str]] = {"lora_int_id": "the name says which one is meant"}

    lora_name: Annotated[str, Field(max_length=4096)]


Packed = Annotated[int, Field(ge=1, le=MOST_BUFFER_BYTES)]


class InitInfo(Body):
    """The place where a trainer is met."""

    harmless: ClassVar[Mapping[str, str]] = {"packed_num_buffers": "how many buffers are used is no part of the wire"}

    master_address: Annotated[str, Field(max_length=256)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=4096)]
    world_size: Annotated[int, Field(ge=2, le=4096)]
    packed: bool = False
    packed_buffer_size_bytes: Packed | None = None


class InitTransferBody(Body):
    """The body of POST /init_weight_transfer_engine."""

    init_info: InitInfo


class StartWeightsBody(Body):
    """The body of POST /start_weight_update."""

    is_checkpoint_format: Literal[True] = True


class UpdateInfo(Body):
    """The tensors that a trainer sends."""

    harmless: ClassVar[Mapping[str, str]] = {"packed_num_buffers": "how many buffers are used is no part of the wire"}

    names: Annotated[list[Annotated[str, Field(max_length=512)]], Field(min_length=1, max_length=MOST_TENSORS)]
    dtype_names: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MOST_TENSORS)]
    shapes: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0, lt=1 << 40)]], Field(max_length=8)]],
        Field(max_length=MOST_TENSORS),
    ]
    packed: bool | None = None
    packed_buffer_size_bytes: Packed | None = None


class UpdateWeightsBody(Body):
    """The body of POST /update_weights."""

    update_info: UpdateInfo


class FinishWeightsBody(Body):
    """The body of POST /finish_weight_update."""

    weight_version: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_TOKENS), WrapValidator(_check_ids)]
