"""The bodies of requests that embed, classify and compare, and what they ask of the engine. Names and meanings are
vLLM's, of which those of embeddings are OpenAI's, and those of reranking Jina's and Cohere's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from ridgeline.core.specs.pooling import TOKENWISE, PoolingParams, Task, checked
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, TooLong
from ridgeline.serving.generation.pooling import PoolingAsked, pooling_facts
from ridgeline.serving.requests.bodies import MOST_ID, MOST_NAME, Body, Name, Object, TemplateBody, texts_or_ids
from ridgeline.serving.requests.context import check_input, check_text
from ridgeline.serving.requests.fields import Refusal
from ridgeline.serving.requests.pooled_chats import encoded_chat
from ridgeline.serving.requests.validation import INLINE_CHARS, check_known, check_model
from ridgeline.serving.shares import TEXTS
from ridgeline.text.pooled import Encoded, check_scores, listed_tokens

MOST_INPUTS = 2048  # texts, or lists of tokens, in one request; OpenAI takes as many
MOST_CHARACTERS = 1 << 25  # of all texts of a request; that of a pair that all share counts in each
MOST_NUMBERS = 1 << 24  # of all vectors in an answer
AT_ONCE = 1 << 18  # characters that a thread is asked to encode before others have their turn

VectorDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]

_T = TypeVar("_T")


def _check_texts(value: object) -> object:
    """Check that there is one text or several, each as it is or as {"text": …}."""
    if isinstance(value, str):
        return value
    listed = value if isinstance(value, list) else None
    if not listed:
        raise ValueError("this is a text or a list of texts")
    if len(listed) > MOST_INPUTS:
        raise ValueError(f"there are {len(listed)} texts; at most {MOST_INPUTS} are taken at once")
    texts = [each.get("text") if isinstance(each, dict) else each for each in listed]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('a list of texts holds texts, or objects with a "text"')
    return texts


def _check_texts_or_null(value: object) -> object:
    return None if value is None else _check_texts(value)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_ID}, "minItems": 1}
_LISTS = [
    {"type": "array", "items": each, "minItems": 1, "maxItems": MOST_INPUTS} for each in ({"type": "string"}, _IDS)
]
_TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_TEXTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _TEXT]}, "minItems": 1, "maxItems": MOST_INPUTS}
Input = Annotated[
    Any,
    BeforeValidator(texts_or_ids("an input", MOST_INPUTS, MOST_ID)),
    WithJsonSchema({"anyOf": [{"type": "string"}, _IDS, *_LISTS]}),
]
Texts = Annotated[
    Any,
    BeforeValidator(_check_texts_or_null),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}),
]
Documents = Annotated[Any, BeforeValidator(_check_texts), WithJsonSchema(_TEXTS)]


class PooledBody(Body):
    """The fields that all of these requests take."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "padding": Refusal("nothing is padded here; leave padding out.", ("do_not_pad",))
    }

    model: str | None = None
    user: Annotated[str, Field(max_length=MOST_NAME)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Name | None = None
    request_id: Name | None = None


class InputBody(PooledBody):
    """The fields of requests about inputs by themselves."""

    input: Input
    add_special_tokens: bool | None = None
    prompt_name: Name | None = None


class ChatInputBody(PooledBody, TemplateBody):
    """The same with a conversation in place of the input."""

    add_special_tokens: bool | None = None


class Encoding(Body):
    """The form of vectors in the answer. Of `bytes` the answer is their bytes alone, and a header tells of each; of
    `bytes_only` there is no such header."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: VectorDtype | None = None
    endianness: Endianness | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class EmbeddingBody(InputBody, Encoding):
    """The body of POST /v1/embeddings."""


class EmbeddingChatBody(ChatInputBody, Encoding):
    """The body of POST /v1/embeddings with a conversation."""


class PoolingBody(InputBody, Encoding):
    """The body of POST /pooling. The task is the model's own, unless it is named."""

    task: Task | None = None


class PoolingChatBody(ChatInputBody, Encoding):
    """The body of POST /pooling with a conversation."""

    task: Task | None = None


class ClassifyBody(InputBody):
    """The body of POST /classify."""


class ClassifyChatBody(ChatInputBody):
    """The body of POST /classify with a conversation."""


class ComparedBody(PooledBody):
    """The fields of requests that compare. A text loses its end beyond so many tokens (0: it keeps all)."""

    instruction: str | None = None
    chat_template_kwargs: Object | None = None
    max_tokens_per_query: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class ScoreBody(ComparedBody):
    """The body of POST /score. Each side has several names."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    items: Texts = None


class RerankBody(ComparedBody):
    """The body of POST /rerank."""

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_documents: bool | None = None


def pooling_params(body: PooledBody, task: Task | None, **more: Any) -> PoolingParams:
    """Return a body's parameters. Raise InvalidRequest."""
    activation = body.normalize if body.use_activation is None else body.use_activation
    return PoolingParams(
        task=task,
        use_activation=activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        **more,
    )


async def inputs(
    api: ApiServer, body: InputBody | ChatInputBody, params: PoolingParams, request_id: str
) -> list[PoolingAsked]:
    """Return one request for each input, or the one of a conversation. Raise RequestFailed or InvalidRequest."""
    check_model(api, body.model)
    checked(params, pooling_facts(api.service))
    if isinstance(body, ChatInputBody):
        made = await encoded_chat(api, body, params, special=bool(body.add_special_tokens))
        return asked(api, body, [made], params, request_id)
    one = isinstance(body.input, str) or isinstance(body.input[0], int)
    listed = [body.input] if one else body.input
    if isinstance(listed[0], str):
        before = api.encoder.prompt(body.prompt_name)
        special = body.add_special_tokens is not False
        each = partial(api.encoder.one, params=params, add_special_tokens=special)
        encoded = await encoded_all(api, [(f"{before}{text}",) for text in listed], each, params)
    else:
        most = api.service.facts().max_model_len
        encoded = [listed_tokens(ids, params, most) for ids in listed]
    return asked(api, body, encoded, params, request_id)


async def encoded_all(
    api: ApiServer, texts: Sequence[tuple[str, ...]], encode_one: Any, params: PoolingParams
) -> list[Encoded]:
    """Return the tokens of texts, or of pairs of them, made in a thread if they are long. Raise TooLong, before any
    work, for texts that could never fit."""
    context = api.service.facts().max_model_len
    sizes = [sum(map(len, text)) for text in texts]
    if sum(sizes) > MOST_CHARACTERS:
        raise TooLong(
            f"the texts have {sum(sizes)} characters in all, in pairs each side counted each time, of at most "
            f"{MOST_CHARACTERS}; send fewer at once.",
            param="input",
        )
    for text in texts:
        if params.truncate_prompt_tokens is None:
            check_text(context, sum(map(len, text)), "input")

    def work(some: Sequence[tuple[str, ...]]) -> list[Encoded]:
        made: list[Encoded] = []
        for text in some:
            made.append(encode_one(*text))
            check_input(context, len(made[-1].ids))  # before the others are read
        return made

    if sum(sizes) <= INLINE_CHARS:
        return work(texts)
    found: list[Encoded] = []
    waiting: list[tuple[str, ...]] = []
    length = 0
    for text, size in zip(texts, sizes, strict=True):
        if waiting and length + size > AT_ONCE:
            found += await TEXTS.run(partial(work, waiting))
            waiting, length = [], 0
        waiting.append(text)
        length += size
    return found + await TEXTS.run(partial(work, waiting))


def asked(
    api: ApiServer, body: PooledBody, prompts: Sequence[Encoded], params: PoolingParams, request_id: str
) -> list[PoolingAsked]:
    """Return the requests of prompts, after a last check that they fit this model."""
    most = api.config.max_queue_requests
    if len(prompts) > most > 0:
        raise BadRequest(f"there are {len(prompts)} inputs, of at most {most} requests at once.", param="input")
    facts = api.service.facts()
    spec = facts.pooling
    if spec is not None:
        tokenwise = (params.task or spec.task) in TOKENWISE
        vectors = sum(len(prompt.ids) for prompt in prompts) if tokenwise else len(prompts)
        numbers = vectors * (params.dimensions or spec.width)
        if numbers > MOST_NUMBERS:
            each = "token" if tokenwise else "input"
            raise TooLong(
                f"the answer would have {numbers} numbers, a vector for each {each}, of at most {MOST_NUMBERS}; "
                "send fewer inputs at once.",
                param="input",
            )
    for prompt in prompts:
        if not prompt.ids:
            raise BadRequest("an input is empty; give at least one token.", param="input")
        check_known(api, prompt.ids, "an input", "input")
        check_input(facts.max_model_len, len(prompt.ids))
    adapter = api.adapter(body.model)
    return [
        PoolingAsked(
            id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
            prompt=prompt,
            params=params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            timeout=api.config.request_timeout,
            queue_timeout=api.config.queue_timeout,
            adapter=adapter,
        )
        for index, prompt in enumerate(prompts)
    ]


async def compared(
    api: ApiServer,
    body: ComparedBody,
    firsts: list[str],
    seconds: list[str],
    request_id: str,
) -> list[PoolingAsked]:
    """Return the requests for comparing one text with each of several, or each with its own: a pair is one request of a
    reranker; of a model that embeds there is one for each text, the first ones first. Raise RequestFailed or
    InvalidRequest."""
    check_model(api, body.model)
    spec = pooling_facts(api.service)
    check_scores(spec)
    params = pooling_params(body, spec.task)
    if len(firsts) not in (1, len(seconds)):
        raise BadRequest(
            f"there are {len(firsts)} texts on one side and {len(seconds)} on the other; give one, or as many.",
            param="text_1",
        )
    firsts = await _beginnings(api, firsts, body.max_tokens_per_query)
    seconds = await _beginnings(api, seconds, body.max_tokens_per_doc)
    if spec.embeds:
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(body, name):
                raise BadRequest(f"{name} is for rerankers, and this model embeds; leave it out.", param=name)
        params = replace(params, use_activation=None)
        encoded = await _encoded_sides(api, firsts, seconds, params, late=spec.task == "token_embed")
    else:
        kwargs = body.chat_template_kwargs
        pair = partial(api.encoder.pair, params=params, instruction=body.instruction, template_kwargs=kwargs)
        one = firsts[0] if len(firsts) == 1 else None
        pairs = [(one, text) for text in seconds] if one is not None else list(zip(firsts, seconds, strict=True))
        encoded = await encoded_all(api, pairs, pair, params)
    return asked(api, body, encoded, params, request_id)


async def _encoded_sides(
    api: ApiServer, firsts: list[str], seconds: list[str], params: PoolingParams, *, late: bool
) -> list[Encoded]:
    """Return the tokens of texts that are compared by their vectors: one for each, or (late) those of their tokens."""
    encoder = api.encoder
    if not late:
        texts = [(f"{encoder.prompt(None)}{text}",) for text in (*firsts, *seconds)]
        return await encoded_all(api, texts, partial(encoder.one, params=params), params)
    sided = [(text, "query") for text in firsts] + [(text, "document") for text in seconds]
    return await encoded_all(api, sided, partial(encoder.side, params=params), params)


async def _beginnings(api: ApiServer, texts: list[str], most: int | None) -> list[str]:
    """Return the texts, each with so many tokens at most. Raise InvalidRequest."""
    if not most:
        return texts

    def work() -> list[str]:
        return [api.tokenizer.beginning(text, most) for text in texts]

    return work() if sum(map(len, texts)) <= INLINE_CHARS else await TEXTS.run(work)


def sides(body: ScoreBody) -> tuple[list[str], list[str]]:
    """Return the texts of both sides. Raise BadRequest unless each side is there under one of its names."""
    found = []
    for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2", "items")):
        given = [name for name in names if getattr(body, name) is not None]
        if len(given) != 1:
            told = f"{' and '.join(given)} are the same" if given else f"{names[0]} is required"
            raise BadRequest(f"{told}; give one of {', '.join(names)}.", param=names[0])
        value = getattr(body, given[0])
        found.append([value] if isinstance(value, str) else value)
    return found[0], found[1]
