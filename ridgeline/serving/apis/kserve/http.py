"""The Open Inference Protocol (KServe v2) over HTTP, with Triton's extensions: tensors as bytes behind the JSON, and
the routes generate and generate_stream. gRPC has the same requests (apis/kserve/inference.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from msgspec import UNSET
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.kserve import inference as kserve
from ridgeline.serving.apis.kserve.inference import (
    InferenceAnswer,
    InferenceAsked,
    Tensor,
    Value,
    check_outputs,
    model_of,
)
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import answers as answers_of
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import request_id, while_connected
from ridgeline.serving.http.health import RETRY_AFTER
from ridgeline.serving.http.pieces import json_of
from ridgeline.serving.http.sse import PlainEvents, Write
from ridgeline.serving.observed.inferences import Inference
from ridgeline.serving.repository.models import ServedModel
from ridgeline.serving.requests.bodies import Body, Name
from ridgeline.serving.requests.bounded_json import INLINE_BYTES, decode
from ridgeline.serving.requests.validation import parse
from ridgeline.serving.shares import off_loop
from ridgeline.version import __version__

HEAD_LENGTH = "inference-header-content-length"  # of the JSON, where bytes follow it
MOST_TENSORS = 64
STREAMS = "this route answers once; use generate_stream for pieces."
EXTENSIONS = ["binary_tensor_data", "generate", "model_configuration", "statistics"]
# TensorRT-LLM's name for a field of ours. Its examples send it, and bad_words, empty.
RENAMED = {"stop_words": "stop"}
PREFIX = "/v2/models/{model:path}"  # names of hub models have a slash

Parameters = dict[str, Any]


class InferInput(Body):
    name: Name
    shape: Annotated[list[int], Field(max_length=kserve.MOST_RANK + 1)]
    datatype: Name
    parameters: Parameters | None = None
    data: list[Any] | None = None


class InferOutput(Body):
    name: Name
    parameters: Parameters | None = None


class InferBody(Body):
    """The body of an inference: its tensors as JSON, or as bytes behind it."""

    id: Name | None = None
    parameters: Parameters | None = None
    inputs: Annotated[list[InferInput], Field(max_length=MOST_TENSORS)]
    outputs: Annotated[list[InferOutput], Field(max_length=MOST_TENSORS)] | None = None


class GenerateBody(Body):
    """The body of generate and generate_stream. Parameters may stand in `parameters` or beside it."""

    text_input: str | list[int]
    id: Name | None = None
    parameters: Parameters | None = None


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["kserve"])

    def state(flag: str, reason: str | None, **more: Any) -> Response:
        if reason is None:
            return JSONResponse({**more, flag: True})
        return JSONResponse({**more, flag: False, "error": reason}, 503, {"Retry-After": RETRY_AFTER})

    @routes.get("/v2", summary="The server", responses=answers_of(answers.KServeServer))
    async def server() -> dict[str, Any]:
        return {"name": "ridgeline", "version": __version__, "extensions": EXTENSIONS}

    @routes.get("/v2/health/live")
    async def live() -> Response:
        return state("live", None)

    @routes.get("/v2/health/ready")
    async def ready() -> Response:
        return state("ready", api.unready_at_all)

    async def metadata(model: str, version: str = "") -> dict[str, Any]:
        return model_of(api, model, version).metadata()

    async def model_ready(model: str, version: str = "") -> Response:
        model_of(api, model, version)
        return state("ready", api.unready, name=model)

    async def config(model: str, version: str = "") -> dict[str, Any]:
        return model_of(api, model, version).config()

    async def statistics(model: str = "", version: str = "") -> dict[str, Any]:
        return kserve.statistics_of(api, model, version)

    async def infer(request: Request, model: str, version: str = "") -> Response:
        found = model_of(api, model, version)
        with api.inferences.of(found.name) as inference:
            data, length = await request.body(), request.headers.get(HEAD_LENGTH)
            body, rest = await off_loop(len(data), INLINE_BYTES, lambda: _split(data, length))
            check_outputs(found, (output.name for output in body.outputs or ()))
            parameters = dict(body.parameters or {})
            binary = parameters.pop("binary_data_output", False)
            for output in body.outputs or ():
                binary = (output.parameters or {}).get("binary_data", binary)
            if parameters.get("stream"):
                raise BadRequest(STREAMS, param="stream")
            tensors = await off_loop(len(data), INLINE_BYTES, lambda: _tensors(body.inputs, rest))
            part = await _whole(request, found, kserve.value_of(found, tensors), parameters, inference)
            return _inferred(found, body.id, part, binary=bool(binary))

    async def generate(request: Request, model: str, version: str = "") -> Response:
        found = model_of(api, model, version)
        with api.inferences.of(found.name) as inference:
            value, parameters, name = await _generate_body(request, found)
            if parameters.get("stream"):
                raise BadRequest(STREAMS, param="stream")
            return JSONResponse(_generated(found, name, await _whole(request, found, value, parameters, inference)))

    async def generate_stream(request: Request, model: str, version: str = "") -> Response:
        found = model_of(api, model, version)
        with ExitStack() as stack:
            inference = stack.enter_context(api.inferences.of(found.name))
            value, parameters, name = await _generate_body(request, found)
            asked = InferenceAsked.of(found, value, parameters, request_id(request), streamed=True)
            if not found.generates:
                raise BadRequest(
                    f"the model {found.name} writes nothing that could be streamed; use infer.", param="model"
                )
            prepared = await kserve.prepared(api, asked)
            under_way = stack.pop_all()

        async def produce(write: Write) -> None:
            with under_way:
                async with aclosing(kserve.answered(api, asked, prepared, inference)) as parts:
                    async for part in parts:
                        with inference.response(empty=part.empty):
                            await write(_generated(found, name, part))

        return PlainEvents(produce)

    async def _whole(
        request: Request, model: ServedModel, value: Value, parameters: Parameters, inference: Inference
    ) -> InferenceAnswer:
        asked = InferenceAsked.of(model, value, parameters, request_id(request), streamed=False)

        async def work() -> InferenceAnswer:
            prepared = await kserve.prepared(api, asked)
            [whole] = [part async for part in kserve.answered(api, asked, prepared, inference)]
            return whole

        return await while_connected(request.receive, work())

    def both(method: Callable[..., Any], path: str, **documented: Any) -> Callable[[Any], None]:
        """Add a route with the version in its path, and one without. The shortest must come last: a name may have
        slashes."""

        def add(route: Any) -> None:
            method(PREFIX + "/versions/{version}" + path, **documented)(route)
            method(PREFIX + path, **documented)(route)

        return add

    told = answers_of(answers.KServeStatistics, 404)
    routes.get("/v2/models/stats", summary="Counts and durations of all models", responses=told)(statistics)
    both(routes.get, "/stats", summary="Counts and durations of a model", responses=told)(statistics)
    both(routes.get, "/config", summary="Its configuration", responses=answers_of(answers.KServeConfig, 404))(config)
    both(routes.get, "/ready", summary="If it is ready", responses=answers_of(answers.KServeReady, 404))(model_ready)
    both(routes.post, "/infer", **described(InferBody, "One answer, as tensors", answers.KServeInferred))(infer)
    generated = described(GenerateBody, "One answer", answers.KServeGenerated)
    both(routes.post, "/generate", **generated)(generate)
    streamed = described(GenerateBody, "Pieces, as server-sent events", answers.KServeGenerated)
    both(routes.post, "/generate_stream", **streamed)(generate_stream)
    both(routes.get, "", summary="A model", responses=answers_of(answers.KServeModel, 404))(metadata)
    return routes


# ---- what comes -----------------------------------------------------------------------------------------------------


def _split(data: bytes, length: str | None) -> tuple[InferBody, bytes]:
    """Return the JSON of a body, and the bytes behind it."""
    if length is not None and not (length.isascii() and length.isdigit() and int(length[:12]) <= len(data)):
        raise BadRequest(f"{HEAD_LENGTH} is {length[:20]!r}, and the body has {len(data)} bytes.")
    end = len(data) if length is None else int(length)
    return parse(InferBody, decode(data[:end])), data[end:]


def _tensors(inputs: Sequence[InferInput], rest: bytes) -> list[Tensor]:
    found, at = [], 0
    for each in inputs:
        size = (each.parameters or {}).get("binary_data_size")
        if size is None:
            found.append(Tensor(each.name, each.datatype, each.shape, _flat(each.name, each.data)))
            continue
        if each.data is not None:
            raise BadRequest(f"{each.name} has both data and binary_data_size; send one of them.", param=each.name)
        if type(size) is not int or not 0 <= size <= len(rest) - at:
            raise BadRequest(f"{each.name} has no {str(size)[:20]} bytes behind the JSON.", param=each.name)
        found.append(kserve.unpacked(each.name, each.datatype, each.shape, rest[at : at + size]))
        at += size
    if at != len(rest):
        raise BadRequest(f"{len(rest) - at} bytes behind the JSON belong to no input.", param="inputs")
    return found


def _flat(name: str, data: list[Any] | None) -> list[Any]:
    """Return the elements of a tensor, which may come in lists of lists."""
    if data is None:
        raise BadRequest(f"{name} has no data.", param=name)
    for _ in range(kserve.MOST_RANK):
        if not data or not all(isinstance(each, list) for each in data):
            return data
        data = [element for each in data for element in each]
    raise BadRequest(f"{name} has more than {kserve.MOST_RANK} dimensions.", param=name)


async def _generate_body(request: Request, model: ServedModel) -> tuple[Value, Parameters, str | None]:
    """Return the input, the parameters, and the id of a request to generate."""
    data = await request.body()
    found = await off_loop(len(data), INLINE_BYTES, lambda: decode(data))
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object.")
    fields: Parameters = dict(found)
    inside, name = fields.pop("parameters", None) or {}, fields.pop("id", None)
    value = fields.pop(model.input.name, None)
    if not isinstance(inside, dict) or not isinstance(name, str | None):
        raise BadRequest("parameters must be an object, and id a text.", param="parameters")
    twice = fields.keys() & inside.keys()
    if twice:
        raise BadRequest(f"{min(twice)[:80]} stands both in parameters and beside it.", param=min(twice)[:80])
    if model.input.datatype == "BYTES":
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        elements = [value]
        if not isinstance(value, str):
            raise BadRequest(f"{model.input.name} must be a text.", param=model.input.name)
    else:
        elements = value if isinstance(value, list) else [value]
    read = kserve.value_of(model, [Tensor(model.input.name, model.input.datatype, [len(elements)], elements)])
    parameters = {RENAMED.get(key, key): each for key, each in (fields | inside).items()}
    return read, {key: each for key, each in parameters.items() if each not in ("", [""])}, name


# ---- what is answered -----------------------------------------------------------------------------------------------


def _inferred(model: ServedModel, name: str | None, part: InferenceAnswer, *, binary: bool) -> Response:
    value = part.value
    assert value is not None
    spec, shape = model.output, kserve.shape_of(model, value)
    output = answers.KServeOutput(name=spec.name, datatype=spec.datatype, shape=shape)
    answer = answers.KServeInferred(
        model_name=model.name,
        model_version=model.version,
        outputs=[output],
        id=UNSET if name is None else name,
        parameters=dict(part.facts or {}) or UNSET,
    )
    if not binary:
        output.data = [value] if isinstance(value, str) else value
        return json_of(answer)
    data = kserve.packed(model.output, value)
    output.parameters = {"binary_data_size": len(data)}
    head = msgspec.json.encode(answer)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Response(head + data, headers=headers, media_type="application/octet-stream")


def _generated(model: ServedModel, name: str | None, part: InferenceAnswer) -> dict[str, Any]:
    own = {} if name is None else {"id": name}
    output = {} if part.value is None else {model.output.name: part.value}
    return {**own, "model_name": model.name, "model_version": model.version, **output, **(part.facts or {})}
