"""Validation of requests, for REST and gRPC alike: from a client's body to what the engine can run. Limits are checked
before any work.

    body = parse(ChatBody, data)
    asked = await chat_request(api, body, request_id)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from ridgeline.core.plan.embeds import MOST_BYTES, PLACEHOLDER, Embeds, Inserted, sent_bytes
from ridgeline.core.plan.request import EVERY_LOGPROB, SamplingParams
from ridgeline.core.settings.serving import TEMPLATE_FIELDS
from ridgeline.media.bounds import BadMedia
from ridgeline.media.items import Item
from ridgeline.media.pool import NoMemory
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, ModelNotFound, TooLong
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.requests.beams import beam_fields, beams_of
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody, GenerationBody, TemplateBody
from ridgeline.serving.requests.bounded_json import NotJson, Size, begun_object, decode
from ridgeline.serving.requests.context import (
    beginning_of,
    check_beginning,
    check_input,
    check_negative,
    check_prompt,
    check_text,
)
from ridgeline.serving.requests.embeds import read_embeds
from ridgeline.serving.requests.fields import REFUSED, examine, known_names, refused_by
from ridgeline.serving.requests.kept import kept_for
from ridgeline.serving.requests.media import refuse_media, with_items
from ridgeline.serving.requests.reading import readable
from ridgeline.serving.requests.refusals import refusal, shortened
from ridgeline.serving.requests.structure import grammar_of
from ridgeline.serving.requests.tools import with_allowed_tools
from ridgeline.serving.shares import RETRY_AFTER, TEMPLATES, TEXTS, Busy
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.infill import infill, marks
from ridgeline.text.media_prompt import MediaPrompt, prompt_with
from ridgeline.text.requests import RequestLimits, most_logprobs, with_spelled_words
from ridgeline.transport.messages import Grammar

__all__ = ["ChatBody", "CompletionBody", "chat_request", "completion_requests", "parse"]

INLINE_CHARS = 4096  # longer texts are tokenized in a thread, because the event loop has other clients
DEFAULT_MAX_TOKENS = 16  # a completion's default, as with OpenAI; a chat may fill the context

MOST_EMBEDDED = 1 << 28  # characters of prompts as vectors in all completions of a request
MOST_SPELLED = 8192  # token ids in all bad words together
MOST_SENT = 1 << 24  # token ids of rules in all completions of a request, each of which takes its own to the engine
# Fields that a body and SamplingParams both have.
SAMPLING = (
    *("n", "best_of", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids", "bad_words"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("guidance_scale", "negative_prompt"),
    *("skip_special_tokens", "detokenize", "prompt_logprobs_start", "seed"),
)

_Body = TypeVar("_Body", bound=BaseModel)


def parse(model_class: type[_Body], data: Any, *, lenient: bool = False, ignored: list[str] | None = None) -> _Body:
    """Return the checked body. Raise BadRequest that names the field, as OpenAI's errors do ("messages.0.role").

    `lenient` accepts unknown fields, as some bodies always do. Those without effect are added to `ignored`.
    """
    if not isinstance(data, Mapping):
        raise BadRequest(f"the body must be a JSON object, got {shortened(data)}.")
    found = examine(model_class, data, lenient=lenient or getattr(model_class, "lenient", False))
    if ignored is not None:
        ignored += found
    try:
        return model_class.model_validate(data)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False), data) from None


def read_names(model_class: type[BaseModel]) -> frozenset[str]:
    """Return the names of the body's fields that are read, if only to refuse them."""
    return known_names(model_class).union(REFUSED, refused_by(model_class))


def check_model(api: ApiServer, name: str | None) -> str:
    """Return the name that the answer carries, which is the client's own. Raise ModelNotFound for an unknown name."""
    if name is None:
        return api.names[0]
    if name not in api.all_names:
        known = ", ".join(each for one in api.beside for each in one.all_names)
        raise ModelNotFound(f"the model {shortened(name)} does not exist; this server has: {known}.", param="model")
    return name


async def completion_requests(api: ApiServer, body: CompletionBody, request_id: str) -> list[GenerationRequest]:
    """Return one request for each prompt. Raise RequestFailed or InvalidRequest."""
    check_model(api, body.model)
    _check_completion(body)
    _check_counts(api, body)
    grammar = await grammar_of(api, body)
    top = _top(api, body.logprobs, "logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    prompt_logprobs = _highest(_top(api, body.prompt_logprobs, "prompt_logprobs"), body.echo and top)
    named = bool(body.logprob_token_ids)  # takes the place of the likeliest ones, as in vLLM
    params = _params(api, body, max_tokens=max_tokens, logprobs=None if named else top, prompt_logprobs=prompt_logprobs)
    prompts, one = _listed(body)
    given = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    one = one and len(prompts) + len(given) == 1
    most, count = api.config.max_queue_requests, (len(prompts) + len(given)) * params.num_drawn
    if count > most > 0:
        raise BadRequest(f"prompts times n (or best_of) are {count}, of at most {most}.", param="prompt")
    params = await _ruled(api, params, count)
    embeds = await _embedded(api, body, given, params.num_drawn)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    special, wanted = body.add_special_tokens is not False, body.max_tokens or 1
    encoded = await _encode_prompts(api, body, texts, special)
    beams = beams_of(body, max_tokens)
    names = (request_id if one else f"{request_id}-{index}" for index in range(len(embeds) + len(prompts)))
    asked = []
    for vectors in embeds:
        places = [PLACEHOLDER] * len(vectors)
        bare = GenerationRequest(
            id=next(names), prompt_token_ids=places, params=params, grammar=grammar, embeds=vectors
        )
        asked.append(_fitted(api, body, bare, "prompt_embeds", wanted))
    spelled: Sequence[str | None] = texts or [None] * len(prompts)
    for text, ids in zip(spelled, encoded or prompts, strict=True):
        if body.truncate_prompt_tokens is not None:
            ids = await TEXTS.run(partial(_truncated, api, body, ids, text if special else None, wanted))
        bare = GenerationRequest(
            id=next(names), prompt=text, prompt_token_ids=ids, params=params, grammar=grammar, beams=beams
        )
        asked.append(_fitted(api, body, bare, "prompt", wanted))
    return asked


def _listed(body: CompletionBody) -> tuple[list[Any], bool]:
    """Return the prompts that came as text or tokens, and True if they are not a list of prompts."""
    prompt = body.prompt
    if not prompt and body.prompt_embeds:
        return [], True
    if prompt is None:
        raise BadRequest("prompt is required.", param="prompt")
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if one else prompt, one


async def _embedded(api: ApiServer, body: CompletionBody, given: list[str], drawn: int) -> list[Embeds]:
    """Return the prompts that came as vectors, read in a thread. Raise BadRequest, TooLong or InvalidRequest."""
    if not given:
        return []
    for name in ("echo", "suffix", "truncate_prompt_tokens", "prompt_logprobs", "use_beam_search", "guidance_scale"):
        if getattr(body, name) not in (None, False):
            raise BadRequest(f"{name} needs a prompt of tokens, not prompt_embeds; leave it out.", param=name)
    limits, size = api.service.limits(), sum(map(len, given)) * drawn
    if size > MOST_EMBEDDED:
        raise TooLong(
            f"prompt_embeds, times n (or best_of), are {size} characters, of at most {MOST_EMBEDDED}; ask for less at "
            "once.",
            param="prompt_embeds",
        )
    if not api.media.holds([len(text) * 3 // 4 for text in given]):
        message = "prompt_embeds together have more bytes than --max-media-bytes leaves one client; send fewer at once."
        raise BadRequest(message, param="prompt_embeds")
    with _counted():
        return [await TEXTS.run(partial(_counted_embeds, api, text, limits)) for text in given]


@contextmanager
def _counted() -> Iterator[None]:
    """Raise BadRequest or Busy for vectors that the memory of media has no room for."""
    try:
        yield
    except BadMedia as error:
        raise BadRequest(f"{error}") from None
    except NoMemory as error:
        raise Busy(f"{error}; try again later.", retry_after=RETRY_AFTER) from None


def _counted_embeds(api: ApiServer, text: str, limits: RequestLimits) -> Embeds:
    """Return the vectors of a prompt, whose bytes count among decoded media for as long as the request is there."""
    found = read_embeds(text, limits)
    api.media.count(found)
    return found


async def _encode_prompts(api: ApiServer, body: CompletionBody, texts: list[str], special: bool) -> list[list[int]]:
    """Return the token ids of prompts that came as text. With a suffix the model is asked for what stands between."""
    if not body.suffix:
        return await encode_all(api, texts, special, must_fit=body.truncate_prompt_tokens is None)
    marked, suffix = marks(api.tokenizer), body.suffix
    if marked is None:
        message = "suffix is not supported: the model has no tokens for filling in the middle; leave it out."
        raise BadRequest(message, param="suffix")
    context = api.service.facts().max_model_len
    for text in texts:
        check_text(context, len(text), "prompt")
    check_text(context, len(suffix), "suffix")
    return await TEXTS.run(lambda: [infill(api.tokenizer, text, suffix, marked) for text in texts])


def _truncated(api: ApiServer, body: GenerationBody, ids: list[int], text: str | None, wanted: int) -> list[int]:
    """Return the last truncate_prompt_tokens ids, or the first ones if truncation_side is right; -1 takes what has
    room: beside the output, or in the encoder.

    `text` is what the ids were made of, if special tokens were put around it. These stay.
    """
    facts = api.service.facts()
    most, context = body.truncate_prompt_tokens or 0, facts.encodes or facts.max_model_len
    wanted = 0 if facts.encodes else wanted
    if most > context:
        raise BadRequest(
            f"truncate_prompt_tokens is {most}, and the context holds {context} tokens; ask for fewer.",
            param="truncate_prompt_tokens",
        )
    most = max(context - wanted, 1) if most == -1 else most
    if len(ids) <= most:
        return ids
    plain = ids if text is None else api.tokenizer.encode(text, add_special_tokens=False)
    added = len(ids) - len(plain)
    before = next((n for n in range(added + 1) if ids[n : n + len(plain)] == plain), None)
    if before is None:  # the tokenizer cuts such a text elsewhere beside special tokens
        before, added, plain = 0, 0, ids
    room = most - added
    if room < 0:
        return ids[:most]
    kept = plain[:room] if body.truncation_side == "right" else plain[len(plain) - room :]
    return ids[:before] + kept + ids[len(ids) - added + before :]


async def chat_request(api: ApiServer, body: ChatBody, request_id: str) -> GenerationRequest:
    """Return the chat's request. Raise RequestFailed or InvalidRequest."""
    check_model(api, body.model)
    body = with_allowed_tools(body)
    _check_chat(body)
    _check_counts(api, body)
    grammar = await grammar_of(api, body)
    named = bool(body.logprob_token_ids)  # takes the place of top_logprobs, as in vLLM
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _params(
        api,
        body,
        max_tokens=api.defaults.max_tokens if most is None else most,
        logprobs=_top(api, body.top_logprobs or 0, "top_logprobs") if body.logprobs and not named else None,
        prompt_logprobs=_top(api, body.prompt_logprobs, "prompt_logprobs"),
    )
    params = await _ruled(api, params, params.num_drawn)
    body, items = await with_items(api, body)
    if items:
        return await _with_media(api, body, items, request_id, params, grammar, most or 1)
    prompt = await render(api, body, use_tools=body.tool_choice != "none")
    special = bool(body.add_special_tokens)
    fits = body.truncate_prompt_tokens is None
    ids = await encode(api, prompt, add_special_tokens=special, param="messages", must_fit=fits)
    if body.truncate_prompt_tokens is not None:
        ids = await TEXTS.run(partial(_truncated, api, body, ids, prompt if special else None, most or 1))
    beams = beams_of(body, params.max_tokens)
    bare = GenerationRequest(
        id=request_id, prompt=prompt, prompt_token_ids=ids, params=params, grammar=grammar, beams=beams
    )
    return readable(api, body, _fitted(api, body, bare, "messages", most or 1))


async def _with_media(
    api: ApiServer,
    body: ChatBody,
    items: list[Item],
    request_id: str,
    params: SamplingParams,
    grammar: Grammar | None,
    wanted: int,
) -> GenerationRequest:
    """Return the request of a chat with pictures or videos. Raise RequestFailed or InvalidRequest."""
    for name in ("truncate_prompt_tokens", "use_beam_search", "guidance_scale", "prompt_logprobs"):
        if getattr(body, name) not in (None, False):
            raise BadRequest(f"{name} is not for prompts with pictures; leave it out.", param=name)
    made = await media_prompt(api, body, items)
    check_decoded(made.inserted)
    bare = GenerationRequest(
        id=request_id,
        prompt=made.text,
        prompt_token_ids=made.token_ids,
        params=params,
        grammar=grammar,
        inserted=made.inserted,
    )
    return readable(api, body, _fitted(api, body, bare, "messages", wanted))


def check_decoded(inserted: Iterable[Inserted]) -> None:
    """Raise BadRequest for more pixels and samples than a message to the engine holds, where no memory is shared."""
    size = sum(map(sent_bytes, inserted))  # as often as it is named
    if size > MOST_BYTES:
        message = (
            f"pictures and sounds are {size} bytes decoded, of at most {MOST_BYTES} in a request; send smaller ones."
        )
        raise BadRequest(message, param="messages")


async def media_prompt(api: ApiServer, body: TemplateBody, items: list[Item]) -> MediaPrompt:
    """Return the prompt of a conversation with marks in place of these items. They are taken out of the list: giving
    back the memory of a large one takes a moment, which must not be the event loop's."""
    use_tools = not isinstance(body, ChatBody) or body.tool_choice != "none"
    contents = (message.content for message in body.messages)
    parts = (part for content in contents for part in (content if isinstance(content, list) else [{"text": content}]))
    length = sum(len(text) for part in parts if isinstance(text := part.get("text"), str))
    check_text(api.service.facts().max_model_len, length, "messages")

    def work() -> MediaPrompt:
        try:
            turn, processor = _template_turn(api, body, use_tools), api.adjusted_processor(body.mm_processor_kwargs)
            made = prompt_with(
                turn.template, api.tokenizer, processor, turn.messages, items, open_ended=turn.goes_on, **turn.arguments
            )
        finally:
            items.clear()  # whose vectors count no longer
        for each in made.inserted:
            if each.embeds is not None:
                api.media.count(each.embeds)
        return made

    with _counted():
        return await TEMPLATES.run(work)


async def chat_length(api: ApiServer, body: ChatBody) -> int:
    """Return the length of a chat's prompt, in tokens."""
    body, items = await with_items(api, body)
    if items:
        return len((await media_prompt(api, body, items)).token_ids)
    prompt = await render(api, body, use_tools=body.tool_choice != "none")
    return len(await encode(api, prompt, False, "messages"))


async def render(api: ApiServer, body: TemplateBody, *, use_tools: bool = True) -> str:
    """Return the prompt of a conversation by the model's template. The template is a program and may take its time, so
    it runs in a thread."""
    refuse_media(api, body)
    return await TEMPLATES.run(partial(_render, api, body, use_tools))


class _TemplateTurn(NamedTuple):
    """A template's work: its messages, and the arguments of `ChatTemplate.render` or, where the last message goes on,
    of `render_open`."""

    template: ChatTemplate
    messages: list[dict[str, Any]]
    goes_on: bool
    arguments: dict[str, Any]


def _render(api: ApiServer, body: TemplateBody, use_tools: bool) -> str:
    turn = _template_turn(api, body, use_tools)
    return (turn.template.render_open if turn.goes_on else turn.template.render)(turn.messages, **turn.arguments)


def _template_turn(api: ApiServer, body: TemplateBody, use_tools: bool) -> _TemplateTurn:
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    template, size = _template(api, body), Size()
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt cannot both be true; leave one out.",
            param="continue_final_message",
        )
    for index, message in enumerate(messages):
        if message["role"] == "developer" and not template.mentions("developer"):
            message["role"] = "system"
        if "reasoning" in message:  # vLLM's name for what templates call reasoning_content
            message.setdefault("reasoning_content", message["reasoning"])
        if message.get("tool_calls"):
            message["tool_calls"] = [_plain_call(call, index, size) for call in message["tool_calls"]]
    given = dict(body.chat_template_kwargs or {})
    taken = TEMPLATE_FIELDS & given.keys()
    if taken:
        name = min(taken)
        raise BadRequest(f"{name} is a field of its own; it cannot be set here.", param=f"chat_template_kwargs.{name}")
    fields = {name: value for name in ("documents", "reasoning_effort") if (value := getattr(body, name)) is not None}
    extra = {**(api.config.default_chat_template_kwargs or {}), **_switches(template, body), **fields, **given}
    arguments = {**extra, "tools": (body.tools if use_tools else None) or None}
    if not goes_on:
        arguments["add_generation_prompt"] = body.add_generation_prompt is not False
    return _TemplateTurn(template, messages, goes_on, arguments)


def _switches(template: ChatTemplate, body: TemplateBody) -> dict[str, bool]:
    """Return the switches of thinking that a template has in place of an effort: "none" turns them off, and any other
    effort on."""
    effort = body.reasoning_effort
    if effort is None or template.mentions("reasoning_effort"):
        return {}
    return {name: effort != "none" for name in ("enable_thinking", "thinking") if template.mentions(name)}


def _template(api: ApiServer, body: TemplateBody) -> ChatTemplate:
    """Return the template of a request: the model's, or its own where the operator lets it bring one."""
    if body.chat_template is None:
        return api.template_of(getattr(body, "model", None))
    if not api.config.trust_request_chat_template:
        message = "a request cannot bring a chat template here (--trust-request-chat-template); leave it out."
        raise BadRequest(message, param="chat_template")
    return api.chat_template.with_source(body.chat_template)


async def encode(
    api: ApiServer, text: str, add_special_tokens: bool = True, param: str = "prompt", *, must_fit: bool = False
) -> list[int]:
    """Return the text's token ids. Raise TooLong, before any work, if they could never fit. `param` is the text's
    field. must_fit: the caller refuses more tokens than the context, so a beginning may show that they are too many."""
    [ids] = await encode_all(api, [text], add_special_tokens, param, must_fit=must_fit)
    return ids


async def encode_all(
    api: ApiServer,
    texts: Sequence[str],
    add_special_tokens: bool = True,
    param: str = "prompt",
    *,
    must_fit: bool = False,
) -> list[list[int]]:
    """Return the token ids of each text, as `encode` does."""
    context = api.service.facts().max_model_len
    for text in texts:
        check_text(context, len(text), param)

    longest = max(context, api.service.facts().encodes or 0)

    def work() -> list[list[int]]:
        for text in texts if must_fit else ():
            _check_beginning(api, longest, text, param)
        return [api.tokenizer.encode(text, add_special_tokens) for text in texts]

    return work() if sum(map(len, texts)) <= INLINE_CHARS else await TEXTS.run(work)


def _check_beginning(api: ApiServer, context: int, text: str, param: str) -> None:
    """Raise TooLong if a long text's beginning shows that it cannot fit."""
    if (begins := beginning_of(context, text)) is not None:
        check_beginning(context, len(begins), len(api.tokenizer.encode(begins, False)), len(text), param)


async def detokenized(api: ApiServer, ids: list[int], param: str, *, special: bool) -> str:
    """Return the text of token ids, with special tokens or without. Raise BadRequest for one that does not exist."""
    check_known(api, ids, "", param)
    return await TEXTS.run(partial(api.tokenizer.decode, ids, skip_special_tokens=not special))


def check_known(api: ApiServer, ids: Sequence[int], what: str, param: str) -> None:
    """Raise BadRequest for an id outside the vocabulary. `what` it stands in, if that is to be said."""
    size, wrong = api.service.facts().vocab_size, max(ids, default=0)
    if wrong >= size:
        told = f"{what} has token id {wrong}, outside" if what else f"token id {wrong} is outside"
        raise BadRequest(f"{told} the vocabulary (0 to {size - 1}).", param=param)


# ---- what a body says ---------------------------------------------------------------------------------------------


def _check_completion(body: CompletionBody) -> None:
    if body.suffix and (body.echo or body.truncate_prompt_tokens is not None or not _is_text(body.prompt)):
        raise BadRequest("suffix goes with a prompt of text, without echo and truncate_prompt_tokens.", param="suffix")
    if body.logprob_token_ids and body.logprobs is None:
        raise BadRequest("logprob_token_ids needs logprobs; give any number.", param="logprob_token_ids")
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens is 0, which asks for nothing; use at least 1, or echo.", param="max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs")
    _check_stream(body)


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise BadRequest("logprob_token_ids needs logprobs to be true.", param="logprob_token_ids")
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs")
    _check_stream(body)


def _check_counts(api: ApiServer, body: GenerationBody) -> None:
    """Check the length of every list that is read item by item later."""
    facts = api.service.facts()
    allowed, negative = len(body.allowed_token_ids or ()), body.negative_prompt
    if allowed > facts.vocab_size:
        message = f"allowed_token_ids has {allowed} ids, and the vocabulary {facts.vocab_size}; name each once."
        raise BadRequest(message, param="allowed_token_ids")
    if isinstance(negative, list):
        check_negative(facts.max_model_len, len(negative))


def _check_stream(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise BadRequest(
            "best_of chooses when all have ended, so it cannot be streamed; set stream to false.", param="best_of"
        )


def _params(
    api: ApiServer, body: GenerationBody, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters over the model's own defaults. Raise InvalidRequest for a value out of range."""
    if body.stop and body.detokenize is False:
        raise BadRequest("stop needs detokenize to be true; use stop_token_ids.", param="stop")
    if body.logprob_token_ids and body.use_beam_search:
        raise BadRequest(
            "logprob_token_ids cannot be had with beam search; leave one of them out.", param="logprob_token_ids"
        )
    given: dict[str, Any] = dict(api.defaults.sampling)
    given |= {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if body.seed == -1:  # vLLM's word for none
        del given["seed"]
    if body.use_beam_search:
        given = beam_fields(body)
    elif body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if body.logprob_token_ids:
        given["logprob_token_ids"] = body.logprob_token_ids
    if body.repetition_detection is not None:
        given["repetition_detection"] = body.repetition_detection.model_dump(exclude_none=True)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


async def _ruled(api: ApiServer, params: SamplingParams, completions: int) -> SamplingParams:
    """Return the parameters with texts as token ids, which are spelled in a thread. Raise InvalidRequest, or BadRequest
    for more ids than the engine should get."""
    texts = [text for text in (params.negative_prompt, *(params.bad_words or ())) if isinstance(text, str)]
    context = api.service.facts().max_model_len
    if isinstance(params.negative_prompt, str):
        check_text(context, len(params.negative_prompt), "negative_prompt")
    if texts:
        params = await TEXTS.run(partial(with_spelled_words, params, api.tokenizer))
        check_negative(context, len(params.negative_prompt or ()))
    allowed, spelled = len(params.allowed_token_ids or ()), sum(map(len, params.bad_words or ()))
    if spelled > MOST_SPELLED:
        message = (
            f"bad_words are {spelled} tokens, with and without a space before them; at most {MOST_SPELLED} may be."
        )
        raise BadRequest(message, param="bad_words")
    if (allowed + spelled) * completions > MOST_SENT:
        raise BadRequest(
            f"allowed_token_ids and bad_words are {allowed + spelled} token ids for each of {completions} completions, "
            f"and at most {MOST_SENT} in all; ask for fewer completions at once.",
            param="allowed_token_ids" if allowed else "bad_words",
        )
    return params


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise BadRequest(f"logit_bias maps token ids to -100..100, got the key {shortened(key)}.", param="logit_bias")
    return int(key)


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], str))


def _top(api: ApiServer, count: int | None, param: str) -> int | None:
    """Return a count of logprobs, of which -1 is the whole vocabulary."""
    if count is None:
        return None
    limits = api.service.limits()
    size, most = limits.vocab_size, most_logprobs(limits)
    if count == EVERY_LOGPROB and size > most:
        raise BadRequest(f"{param} is -1, which asks for all {size} tokens; at most {most} may be had.", param=param)
    if count > max(most, 0) and most < size:
        raise BadRequest(f"{param} is {count}, and at most {most} may be had (--max-logprobs).", param=param)
    return size if count == EVERY_LOGPROB else min(count, size)


def _highest(*counts: int | bool | None) -> int | None:
    """Return the highest of the counts that were asked for. 0 is such a count; False and None are not."""
    asked = [int(count) for count in counts if count is not None and count is not False]
    return max(asked, default=None)


def _fitted(
    api: ApiServer, body: GenerationBody, asked: GenerationRequest, param: str, wanted: int
) -> GenerationRequest:
    """Return the request with what its body and the server say of its turn, after a last check that it fits this model.

    There must be room for `wanted` output tokens; a default takes what room there is.
    """
    facts, ids = api.service.facts(), asked.prompt_token_ids
    if not ids:
        raise BadRequest("the prompt is empty; give at least one token.", param=param)
    check_known(api, ids, "the prompt", param)
    if not facts.encodes:
        check_prompt(facts.max_model_len, len(ids), wanted, param)
    else:
        check_input(facts.encodes, len(ids), param)
        check_prompt(facts.max_model_len, len(facts.decoder_start), wanted, "decoder's start")
        if asked.beams is not None:
            raise BadRequest(
                "beam search is not for models with an encoder yet; leave it out.", param="use_beam_search"
            )
    return replace(
        asked,
        adapter=api.adapter(body.model),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        session=body.prompt_cache_key or "",
        keep=kept_for(body),
        slo_ttft=(body.slo_ttft_ms or 0.0) / 1e3,
        slo_itl=(body.slo_itl_ms or 0.0) / 1e3,
        timeout=api.config.request_timeout,
        queue_timeout=api.config.queue_timeout,
    )


def _plain_call(call: dict[str, Any], index: int, size: Size) -> dict[str, Any]:
    """Return the call with its arguments as an object.

    OpenAI sends them as text, and templates expect the object that the text spells. Text that is no JSON, such as what
    was cut off at a limit, does not end a conversation. `size` counts all arguments.
    """
    function, where = call.get("function"), f"messages.{index}.tool_calls"
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"] or "{}"
    try:
        arguments = decode(text.encode(), size)
    except NotJson:
        arguments = begun_object(text)
    except (BadRequest, UnicodeEncodeError) as error:
        raise BadRequest(f"the arguments of a tool call cannot be read: {error}", param=where) from None
    return call | {"function": function | {"arguments": {} if arguments is None else arguments}}
