"""Conversion between protobuf and the rest of the server. Requests become the fields of a REST body, so that one
validation layer checks both; results become messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict, SerializeToJsonError
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ridgeline.core.plan.request import MAX_BAD_WORDS, MAX_STOP_LENGTH
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import Run
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from ridgeline.serving.observed.breakdown import breakdown
from ridgeline.serving.requests.bodies import MOST_TOKENS
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.text.outputs import CompletionOutput, TokenIdLogprobs

# ---- requests -----------------------------------------------------------------------------------------------------


def completion_fields(request: pb.GenerateRequest, model: str, most_tokens: int) -> dict[str, Any]:
    """Return the body of a completion. More than `most_tokens` ids are refused before they become numbers."""
    if request.HasField("token_ids"):
        check_count(request.token_ids.ids, most_tokens, "token_ids")
        prompt: str | list[int] = list(request.token_ids.ids)
    else:
        prompt = request.text
    return _shared_fields(request, model) | {"prompt": prompt}


def chat_fields(request: pb.GenerateRequest, model: str) -> dict[str, Any]:
    """Return the body of a chat completion, which has `logprobs` in two fields."""
    fields = _shared_fields(request, model) | chat_prompt_fields(request.chat)
    if "logprobs" in fields:
        fields["top_logprobs"], fields["logprobs"] = fields["logprobs"], True
    return fields


def chat_prompt_fields(chat: pb.Chat) -> dict[str, Any]:
    """Return the fields of a chat completion's body that make the prompt."""
    messages = [{"role": each.role, "content": each.content} | _plain(each) for each in chat.messages]
    fields: dict[str, Any] = {"messages": messages}
    if chat.HasField("chat_template_kwargs"):
        fields["chat_template_kwargs"] = _json(chat.chat_template_kwargs)
    return fields


def check_known(message: Message) -> None:
    """Raise BadRequest for a field that is not in the .proto file here, as a body's unknown field is refused."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name, number = message.DESCRIPTOR.name, unknown[0].field_number
        raise BadRequest(f"{name} has no field {number} here; leave it out, or bring this server up to date.")
    for field, value in message.ListFields():
        if isinstance(value, Message) and field.message_type.file is message.DESCRIPTOR.file:
            check_known(value)


def check_count(ids: Any, most: int, param: str) -> None:
    """Raise BadRequest if there are more ids than `most`."""
    if len(ids) > most:
        raise BadRequest(f"{param} has {len(ids)} ids; at most {most} are allowed.", param=param)


def _shared_fields(request: pb.GenerateRequest, model: str) -> dict[str, Any]:
    check_count(request.sampling.allowed_token_ids, MOST_TOKENS, "allowed_token_ids")
    check_count(request.sampling.bad_word_ids, MAX_BAD_WORDS, "bad_words")
    fields = _plain(request.sampling) | {"model": model}
    if "bad_word_ids" in fields:
        words = [_word(word) for word in fields.pop("bad_word_ids")]
        fields["bad_words"] = [*fields.get("bad_words", ()), *words]
    if "negative_prompt_ids" in fields:
        negative = fields.pop("negative_prompt_ids").ids
        check_count(negative, MOST_TOKENS, "negative_prompt")
        fields["negative_prompt"] = list(negative)
    if "repetition_detection" in fields:
        fields["repetition_detection"] = _plain(request.sampling.repetition_detection)
    if "logit_bias" in fields:  # JSON's keys are strings
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    for name in ("priority", "cache_salt"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    if request.HasField("structured_outputs"):
        fields["structured_outputs"] = _structured(request.structured_outputs)
    return fields


def _word(word: pb.TokenIds) -> list[int]:
    check_count(word.ids, MAX_STOP_LENGTH, "bad_words")
    return list(word.ids)


def _structured(asked: pb.StructuredOutputs) -> dict[str, Any]:
    match asked.WhichOneof("kind"):
        case "choice":
            return {"choice": list(asked.choice.options)}
        case "json":
            return {"json": schema(asked.json)}
        case None:
            raise BadRequest(
                "structured_outputs is empty; set json, regex, choice or grammar.", param="structured_outputs"
            )
        case kind:
            return {kind: getattr(asked, kind)}


def schema(text: str) -> Any:
    """Return the JSON schema that came as text."""
    try:
        return decode(text.encode())
    except BadRequest as error:
        raise BadRequest(f"the JSON schema: {error}", param="structured_outputs.json") from None


def _plain(message: Any) -> dict[str, Any]:
    """Return the fields that are set, by name."""
    return {field.name: _value(value) for field, value in message.ListFields()}


def _value(value: Any) -> Any:
    if isinstance(value, (str, int, float, Message)):
        return value
    return dict(value) if hasattr(value, "items") else list(value)


def _json(struct: Any) -> dict[str, Any]:
    """Return a Struct's content. Its numbers are floats; whole ones become integers, as JSON's readers return them."""
    try:
        return _whole(MessageToDict(struct))
    except (ValueError, SerializeToJsonError) as error:  # JSON has no infinities
        raise BadRequest(f"chat_template_kwargs: {error}.", param="chat_template_kwargs") from None


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ---- results ------------------------------------------------------------------------------------------------------


def piece_message(piece: Piece, run: Run) -> pb.Piece:
    output = piece.output
    message = pb.Piece(index=output.index, text=piece.text, token_ids=piece.token_ids)
    if output.logprobs is not None and piece.token_ids:
        count, params = len(output.logprobs), run.asked.params
        new = (output.logprobs[i] for i in range(count - len(piece.token_ids), count))
        message.logprobs.extend(
            _positions(piece.token_ids, new, params.num_logprobs or 0, named=params.logprob_token_ids)
        )
    return message


def prompt_message(run: Run) -> pb.PromptLogprobs:
    """Return the prompt's logprobs, once they are there."""
    entries = (entry for entry in run.result.prompt_logprobs or () if entry is not None)
    ids = run.asked.prompt_token_ids[run.asked.params.scored_from :]
    return pb.PromptLogprobs(positions=_positions(ids, entries, run.asked.params.prompt_logprobs or 0))


def finish_message(run: Run, output: CompletionOutput, *, with_breakdown: bool) -> pb.Finish:
    """Return the message of a completion's end. A completion that did not end by itself was aborted."""
    place = run.place(output)
    ended = run.endings[place]
    kept = sum(len(each.token_ids) for each in run.result.outputs)
    usage = pb.Usage(
        prompt_tokens=len(run.asked.prompt_token_ids),
        completion_tokens=len(output.token_ids),
        cached_tokens=ended.stats.cached_tokens if ended is not None else 0,
        discarded_tokens=run.drawn_tokens - kept if output.index == 0 else 0,
    )
    message = pb.Finish(index=output.index, reason=output.finish_reason or "abort", usage=usage)
    if isinstance(output.stop_reason, str):
        message.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        message.stop_token_id = output.stop_reason
    if with_breakdown and ended is not None:
        message.breakdown.CopyFrom(_breakdown(breakdown(run)["completions"][place]))
    return message


def _breakdown(entry: dict[str, Any]) -> pb.Breakdown:
    names = [field.name for field in pb.Breakdown.DESCRIPTOR.fields]
    return pb.Breakdown(**{name: entry[name] for name in names if entry.get(name) is not None})


def _positions(
    token_ids: Iterable[int], entries: Iterable[TokenIdLogprobs], most: int, named: list[int] | None = None
) -> Iterable[pb.PositionLogprobs]:
    for token_id, entry in zip(token_ids, entries, strict=True):
        # in order; the token that stands there comes last if it is none of the likeliest
        likeliest = list(entry)[:most] if named is None else named
        yield pb.PositionLogprobs(chosen=_logprob(token_id, entry), top=[_logprob(other, entry) for other in likeliest])


def _logprob(token_id: int, entry: TokenIdLogprobs) -> pb.TokenLogprob:
    found = entry[token_id]
    return pb.TokenLogprob(
        token_id=token_id, token=found.decoded_token or "", logprob=found.logprob, rank=found.rank or 0
    )
