"""Requests of the Open Inference Protocol (KServe v2), the same over HTTP and gRPC: tensors and parameters, checked,
and what they ask for.

    model = model_of(api, name, version)
    value = value_of(model, tensors)
    asked = InferenceAsked.of(model, value, parameters, ...)
    async for part in answered(api, asked, await prepared(api, asked), inference):
        ...
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, ModelNotFound
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.observed.inferences import Inference
from ridgeline.serving.repository.models import ServedModel, TensorSpec
from ridgeline.serving.repository.queue import Queue
from ridgeline.serving.requests.bodies import MOST_TOKENS, CompletionBody
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.serving.requests.validation import completion_requests, detokenized, encode, parse
from ridgeline.text.outputs import CompletionOutput

MOST_RANK = 8  # dimensions of a tensor
# Parameters are scalars, so these fields may come as text that is JSON.
AS_JSON = frozenset(
    {"stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "repetition_detection"}
    | {"structured_outputs", "response_format"}
)
# The protocol says these elsewhere or, in the case of `timeout`, in another way.
NOT_FIELDS = frozenset({"model", "prompt", "stream", "timeout"})
EMPTY_FINAL = "triton_enable_empty_final_response"
WIDTHS = {"INT32": "i", "INT64": "q"}

Value = str | list[int]


@dataclass(frozen=True)
class Tensor:
    """A tensor that came: its elements are texts in bytes, or whole numbers."""

    name: str
    datatype: str
    shape: Sequence[int]
    elements: Sequence[Any]


def model_of(api: ApiServer, name: str, version: str) -> ServedModel:
    """Return the model of this name. Raise ModelNotFound."""
    if not name:
        raise BadRequest("the model's name is empty; ridgeline.v1.Inference/ListModels tells it.", param="model")
    found = api.served.get(name)
    if found is None:
        known = ", ".join(api.served)
        raise ModelNotFound(f"the model {name[:200]!r} does not exist; this server has: {known}.", param="model")
    if version not in ("", found.version):
        raise ModelNotFound(
            f"model {name!r} has no version {version[:200]!r}, only {found.version}.", param="model_version"
        )
    return found


def statistics_of(api: ApiServer, name: str, version: str) -> dict[str, Any]:
    """Return the figures of the model of this name, or of all models where it is empty. Raise ModelNotFound."""
    if name:
        return {"model_stats": [api.inferences.told(model_of(api, name, version))]}
    return {"model_stats": [each.inferences.told(model) for each in api.beside for model in each.served.values()]}


def check_outputs(model: ServedModel, names: Iterable[str]) -> None:
    for name in names:
        if name != model.output.name:
            raise BadRequest(f"there is no output {name[:200]!r}, only {model.output.name}.", param="outputs")


def value_of(model: ServedModel, tensors: Sequence[Tensor]) -> Value:
    """Return the value of the one input: a text, or token ids. Raise BadRequest."""
    spec = model.input
    if len(tensors) != 1 or tensors[0].name != spec.name:
        names = ", ".join(tensor.name[:50] for tensor in tensors[:10]) or "none"
        raise BadRequest(f"the model takes one input, {spec.name}; got {names}.", param="inputs")
    [tensor] = tensors
    shape, count = list(tensor.shape), len(tensor.elements)
    if spec.datatype == "BYTES":
        if tensor.datatype != "BYTES" or len(shape) > MOST_RANK or any(size != 1 for size in shape):
            raise BadRequest(
                f"{spec.name} is BYTES of shape [1], got {tensor.datatype[:20]} {shape[:8]}.", param=spec.name
            )
        if count != 1:
            raise BadRequest(f"{spec.name} has {count} elements, and its shape says 1.", param=spec.name)
        return _text(spec, tensor.elements[0])
    if tensor.datatype != spec.datatype or len(shape) > MOST_RANK or any(size != 1 for size in shape[:-1]):
        raise BadRequest(
            f"{spec.name} is {spec.datatype} of shape [-1], got {tensor.datatype[:20]} {shape[:8]}.", param=spec.name
        )
    if count > MOST_TOKENS or count != prod(shape):
        raise BadRequest(f"{spec.name} has {count} elements, and its shape says {shape[:8]}.", param=spec.name)
    if any(type(each) is not int or each < 0 for each in tensor.elements):
        raise BadRequest(f"{spec.name} holds token ids, which are whole numbers from 0.", param=spec.name)
    return list(tensor.elements)


def unpacked(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """Return a tensor that came as bytes: texts after their length in 4 bytes, or numbers, little endian."""
    if datatype == "BYTES":
        if len(data) < 4 or int.from_bytes(data[:4], "little") != len(data) - 4:
            raise BadRequest(f"{name} as bytes is one element after its length in 4 bytes (little endian).", param=name)
        return Tensor(name, datatype, shape, [data[4:]])
    if datatype not in WIDTHS:
        raise BadRequest(f"{name} has the datatype {datatype[:20]!r}; BYTES, INT32 and INT64 are known.", param=name)
    kind = WIDTHS[datatype]
    width = struct.calcsize(f"<{kind}")
    if len(data) % width or len(data) > width * MOST_TOKENS:
        raise BadRequest(f"{name} has {len(data)} bytes, which are no {MOST_TOKENS} numbers of {width}.", param=name)
    return Tensor(name, datatype, shape, struct.unpack(f"<{len(data) // width}{kind}", data))


def packed(spec: TensorSpec, value: Value) -> bytes:
    """Return an output as bytes, as `unpacked` reads them."""
    if isinstance(value, str):
        data = value.encode()
        return len(data).to_bytes(4, "little") + data
    return struct.pack(f"<{len(value)}{WIDTHS[spec.datatype]}", *value)


def shape_of(model: ServedModel, value: Value) -> list[int]:
    """Return the shape of an output."""
    own = 1 if isinstance(value, str) else len(value)
    return [1, own] if model.batched else [own]


# ---- what is asked for ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InferenceAsked:
    """A request to a model. An answer that is `streamed` may come in parts, and its last part be without an output if
    `empty_final`."""

    model: ServedModel
    value: Value
    parameters: dict[str, Any]
    request_id: str
    streamed: bool = False
    empty_final: bool = False

    @classmethod
    def of(
        cls, model: ServedModel, value: Value, parameters: dict[str, Any], request_id: str, *, streamed: bool
    ) -> InferenceAsked:
        """Return a request with these parameters, of which Triton's own about a stream's last response is one. Raise
        BadRequest."""
        known = dict(parameters)
        empty_final = known.pop(EMPTY_FINAL, False)
        if not isinstance(empty_final, bool):
            message = f"{EMPTY_FINAL} must be true or false, got {str(empty_final)[:80]!r}."
            raise BadRequest(message, param=EMPTY_FINAL)
        return cls(
            model=model,
            value=value,
            parameters=known,
            request_id=request_id,
            streamed=streamed,
            empty_final=empty_final,
        )


@dataclass(frozen=True)
class InferenceAnswer:
    """An answer to a request, or a part of one in a stream. The last one has the facts of the run, and is `empty` if
    the parts before it held everything."""

    value: Value | None
    facts: Mapping[str, str | int] | None = None
    empty: bool = False


async def prepared(api: ApiServer, asked: InferenceAsked) -> GenerationRequest | None:
    """Return the checked request to the engine, or None for a model that does not generate. Raise RequestFailed or
    InvalidRequest."""
    model = asked.model
    if not model.generates:
        return None
    fields, timeout = fields_of(asked.parameters)
    if fields.get("n", 1) != 1:
        raise BadRequest(
            f"n must be 1, got {str(fields['n'])[:80]}: {model.output.name} holds one text; ridgeline.v1.Inference "
            "gives more.",
            param="n",
        )
    fields |= {"model": model.name if model.name in api.all_names else api.names[0], "prompt": asked.value}
    [request] = await completion_requests(api, parse(CompletionBody, fields), asked.request_id)
    return _queued(model.queue, request).within(timeout)


def fields_of(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """Return the fields of a completion among a request's parameters, and its timeout in seconds. Raise BadRequest."""
    given = {name: _plain(name, each) for name, each in parameters.items()}
    return {name: each for name, each in given.items() if name not in NOT_FIELDS}, timeout_of(given)


def _queued(queue: Queue, request: GenerationRequest) -> GenerationRequest:
    """Return the request with its priority and its wait by its level, if the model's queue has levels."""
    if not queue.levels:
        return request
    level = queue.level(request.priority)
    wait = queue.timeouts.get(level, request.queue_timeout)
    return replace(request, priority=queue.priority(level), queue_timeout=wait)


async def answered(
    api: ApiServer,
    asked: InferenceAsked,
    request: GenerationRequest | None,
    inference: Inference,
    known: Callable[[Run], AbstractContextManager[None]] = lambda run: nullcontext(),
) -> AsyncGenerator[InferenceAnswer]:
    """Run a request and yield its answer, in parts if it is `streamed` and can be.

    `request` is what `prepared` returned. `known` surrounds its run. Raise RequestFailed or InvalidRequest.
    """
    model = asked.model
    if request is None:
        inference.computes()
        yield InferenceAnswer(await _converted(api, asked), {})
        return
    # with best_of the chosen completion comes at once, when all have ended
    alone = request.params.num_drawn == 1 and request.beams is None
    parts = asked.streamed and bool(asked.parameters.get("stream", True)) and alone
    async with api.service.run(request) as run:
        inference.run = run
        with known(run):
            async for piece in run.pieces():
                if parts and (part := _result(model, piece)):
                    yield InferenceAnswer(part)
    whole = _result(model, run.result.outputs[0])
    rest = (None if asked.empty_final else type(whole)()) if parts else whole
    yield InferenceAnswer(rest, _facts(run), empty=parts)


async def _converted(api: ApiServer, asked: InferenceAsked) -> Value:
    """Return the output of a model that does not generate."""
    model, value = asked.model, asked.value
    if asked.parameters:
        name = min(asked.parameters)
        raise BadRequest(f"the model {model.name} takes no parameters; leave {name[:80]!r} out.", param=name[:80])
    if isinstance(value, str):
        return await encode(api, value, True, model.input.name)
    return await detokenized(api, value, "inputs", special=False)


def _result(model: ServedModel, output: CompletionOutput | Piece) -> Value:
    """Return the value of a completion, or of a part of one, for the model's clients."""
    return output.text if model.role == "text" else list(output.token_ids)


def _facts(run: Run) -> dict[str, str | int]:
    """Return the facts of a run at its end, as parameters of its response."""
    usage = run.usage
    return {
        "finish_reason": run.result.outputs[0].finish_reason or "",
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "cached_tokens": usage.cached,
    }


def timeout_of(parameters: dict[str, Any]) -> float | None:
    """Return the timeout in seconds. The protocol gives it in microseconds, and 0 is none."""
    value = parameters.get("timeout", 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise BadRequest(f"timeout must be a whole number of microseconds, got {str(value)[:80]!r}.", param="timeout")
    return value / 1e6 or None


def _text(spec: TensorSpec, element: Any) -> str:
    if isinstance(element, str):
        return element
    if not isinstance(element, bytes):
        raise BadRequest(f"{spec.name} must hold a text.", param=spec.name)
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{spec.name} is not UTF-8: {error.reason} at byte {error.start}.", param=spec.name) from None


def _plain(name: str, value: Any) -> Any:
    if name not in AS_JSON or not isinstance(value, str):
        return value
    try:
        return decode(value.encode())
    except BadRequest:
        raise BadRequest(f"parameter {name} must be JSON, got {value[:200]!r}.", param=name) from None
