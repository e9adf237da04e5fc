"""The Open Inference Protocol (KServe v2), for a model with one text in and one text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from grpc.aio import ServicerContext as Context

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, ModelNotFound, RequestFailed
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.grpc.generate import within
from ridgeline.serving.grpc.guard import failure_of, request_id_of
from ridgeline.serving.grpc.health import ready
from ridgeline.serving.grpc.proto import kserve_pb2 as pb
from ridgeline.serving.grpc.proto import kserve_pb2_grpc
from ridgeline.serving.grpc.running import Running
from ridgeline.serving.requests.bodies import CompletionBody
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.serving.requests.validation import check_model, completion_requests, parse
from ridgeline.version import __version__

INPUT, OUTPUT, VERSION = "text_input", "text_output", "1"
# Parameters are scalars, so these fields come as text that is JSON.
AS_JSON = frozenset(
    {"stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "repetition_detection"}
    | {"structured_outputs", "response_format"}
)
# The protocol says these elsewhere or, in the case of `timeout`, in another way.
NOT_FIELDS = frozenset({"model", "prompt", "stream", "timeout"})
MOST_RANK = 8  # dimensions of a tensor with one element
MOST_AT_ONCE = 1024  # requests of one stream that run side by side
MOST_WAITING = 16  # responses that may wait for a stream's reader


class KServeService(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """The service of the protocol. Its methods raise errors that `guard` turns into statuses."""

    def __init__(self, api: ApiServer, running: Running) -> None:
        self._api, self._running = api, running

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=ready(self._api))

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        known = request.name in self._api.names and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=known and ready(self._api))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="ridgeline", version=__version__)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        self._check_model(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform="ridgeline",
            inputs=[tensor(name=INPUT, datatype="BYTES", shape=[1])],
            outputs=[tensor(name=OUTPUT, datatype="BYTES", shape=[1])],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if parameters_of(request).get("stream"):
            raise BadRequest("ModelInfer answers once; use ModelStreamInfer for pieces.", param="stream")
        async with self._api.service.run(await self._asked(request, context)) as run:
            with self._running.known(run, context):
                await run.finish()
        return last_response(request, run, run.result.outputs[0].text)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Yield the responses to a stream of requests. The requests run side by side; a response bears its request's
        id."""
        responses: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue(MOST_WAITING)
        working = asyncio.create_task(self._serve(requests, context, responses))
        try:
            while (response := await responses.get()) is not None:
                yield response
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working

    # ---- inside -----------------------------------------------------------------------------------------------

    async def _serve(self, requests: AsyncIterator[pb.ModelInferRequest], context: Context, responses: Any) -> None:
        room = asyncio.Semaphore(MOST_AT_ONCE)

        async def work(request: pb.ModelInferRequest) -> None:
            try:
                async for response in self._pieces(request, context):
                    await responses.put(pb.ModelStreamInferResponse(infer_response=response))
            except Exception as error:
                await responses.put(error_response(request, failure_of(error)))
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            try:
                async for request in requests:
                    await room.acquire()
                    group.create_task(work(request))
            except Exception as error:  # a message that cannot be decoded ends the stream
                await responses.put(error_response(pb.ModelInferRequest(), failure_of(error)))
        await responses.put(None)

    async def _pieces(self, request: pb.ModelInferRequest, context: Context) -> AsyncIterator[pb.ModelInferResponse]:
        asked = await self._asked(request, context)
        # With best_of the chosen completion is one piece, once all have ended.
        streams = parameters_of(request).get("stream", True) and asked.params.num_drawn == 1
        async with self._api.service.run(asked) as run:
            with self._running.known(run, context):
                async for piece in run:
                    if streams and piece.text:
                        yield text_response(request, piece.text)
        yield last_response(request, run, "" if streams else run.result.outputs[0].text)

    async def _asked(self, request: pb.ModelInferRequest, context: Context) -> GenerationRequest:
        self._check_model(request.model_name, request.model_version)
        for output in request.outputs:
            if output.name != OUTPUT:
                raise BadRequest(f"there is no output {output.name[:200]!r}, only {OUTPUT}.", param="outputs")
        parameters = parameters_of(request)
        timeout = timeout_of(parameters)
        fields = {name: value for name, value in parameters.items() if name not in NOT_FIELDS}
        if fields.get("n", 1) != 1:
            raise BadRequest(
                f"n must be 1, got {fields['n']!r}: {OUTPUT} holds one text; ridgeline.v1.Inference gives more.",
                param="n",
            )
        fields |= {"model": request.model_name, "prompt": text_of(request)}
        [asked] = await completion_requests(self._api, parse(CompletionBody, fields), request_id_of(context))
        return within(asked, timeout=timeout, context=context)

    def _check_model(self, name: str, version: str) -> None:
        if not name:
            raise BadRequest("the model's name is empty; ridgeline.v1.Inference/ListModels tells it.", param="model")
        check_model(self._api, name)
        if version not in ("", VERSION):
            raise ModelNotFound(
                f"model {name!r} has no version {version[:200]!r}, only {VERSION}.", param="model_version"
            )


def parameters_of(request: pb.ModelInferRequest) -> dict[str, Any]:
    """Return the request's parameters as a REST body has them."""
    found = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise BadRequest(f"parameter {name[:200]!r} has no value; set one or leave it out.", param=name)
        value = getattr(parameter, kind)
        found[name] = _from_json(name, value) if name in AS_JSON and isinstance(value, str) else value
    return found


def timeout_of(parameters: dict[str, Any]) -> float | None:
    """Return the timeout in seconds. The protocol gives it in microseconds, and 0 is none."""
    value = parameters.get("timeout", 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRequest(f"timeout must be a whole number of microseconds, got {str(value)[:80]!r}.", param="timeout")
    return value / 1e6 or None


def text_of(request: pb.ModelInferRequest) -> str:
    """Return the one element of the one input, whichever field holds it."""
    if len(request.inputs) != 1 or request.inputs[0].name != INPUT:
        names = ", ".join(tensor.name[:50] for tensor in request.inputs[:10]) or "none"
        raise BadRequest(f"the model takes one input, {INPUT}; got {names}.", param="inputs")
    [tensor] = request.inputs
    if tensor.datatype != "BYTES" or len(tensor.shape) > MOST_RANK or any(size != 1 for size in tensor.shape):
        raise BadRequest(
            f"{INPUT} is BYTES of shape [1], got {tensor.datatype[:20]} {list(tensor.shape)[:8]}.", param=INPUT
        )
    if len(request.raw_input_contents) > 1:
        raise BadRequest(f"{INPUT} has {len(request.raw_input_contents)} elements, and its shape says 1.", param=INPUT)
    elements = [_raw(data) for data in request.raw_input_contents]
    if elements and tensor.HasField("contents"):
        raise BadRequest(f"{INPUT} has both contents and raw_input_contents; send one of them.", param=INPUT)
    elements = elements or list(tensor.contents.bytes_contents)
    if len(elements) != 1:
        raise BadRequest(f"{INPUT} has {len(elements)} elements, and its shape says 1.", param=INPUT)
    try:
        return elements[0].decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{INPUT} is not UTF-8: {error.reason} at byte {error.start}.", param=INPUT) from None


def text_response(request: pb.ModelInferRequest, text: str) -> pb.ModelInferResponse:
    """Return the response with this text, as raw bytes if the request was raw."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    output = response.outputs.add(name=OUTPUT, datatype="BYTES", shape=[1])
    data = text.encode()
    if request.raw_input_contents:
        response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
    else:
        output.contents.bytes_contents.append(data)
    return response


def last_response(request: pb.ModelInferRequest, run: Run, text: str) -> pb.ModelInferResponse:
    """Return the last response of a run: why the text ended, and its usage. Triton's clients recognize a stream's last
    response by a parameter."""
    response, output = text_response(request, text), run.result.outputs[0]
    response.parameters["finish_reason"].string_param = output.finish_reason or ""
    response.parameters["prompt_tokens"].int64_param = len(run.asked.prompt_token_ids)
    response.parameters["completion_tokens"].int64_param = run.drawn_tokens
    response.parameters["cached_tokens"].int64_param = run.cached_tokens
    response.parameters["triton_final_response"].bool_param = True
    return response


def error_response(request: pb.ModelInferRequest, failure: RequestFailed) -> pb.ModelStreamInferResponse:
    told = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    return pb.ModelStreamInferResponse(error_message=failure.message, infer_response=told)


def _raw(data: bytes) -> bytes:
    """Return a BYTES tensor of one element: the length in 4 bytes, then the data."""
    if len(data) < 4 or int.from_bytes(data[:4], "little") != len(data) - 4:
        raise BadRequest(
            f"raw_input_contents of {INPUT} must be one element after its length in 4 bytes (little endian).",
            param=INPUT,
        )
    return data[4:]


def _from_json(name: str, text: str) -> Any:
    try:
        return decode(text.encode())
    except BadRequest:
        raise BadRequest(f"parameter {name} must be JSON, got {text[:200]!r}.", param=name) from None
