"""The Open Inference Protocol (KServe v2), for a model with one text in and one text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from google.protobuf.json_format import ParseDict
from grpc.aio import ServicerContext as Context

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.grpc.generate import within
from ridgeline.serving.apis.grpc.guard import request_id_of
from ridgeline.serving.apis.grpc.health import ready
from ridgeline.serving.apis.grpc.running import Running
from ridgeline.serving.apis.kserve import inference as kserve
from ridgeline.serving.apis.kserve.inference import (
    InferenceAnswer,
    InferenceAsked,
    Tensor,
    Value,
    check_outputs,
    model_of,
)
from ridgeline.serving.errors import BadRequest, RequestFailed, failure_of
from ridgeline.serving.grpc.proto import kserve_pb2 as pb
from ridgeline.serving.observed.inferences import Inference
from ridgeline.serving.repository.models import ServedModel
from ridgeline.version import __version__

MOST_AT_ONCE = 1024  # requests of one stream that run side by side
MOST_WAITING = 16  # responses that may wait for a stream's reader
CONTENTS = {"BYTES": "bytes_contents", "INT32": "int_contents", "INT64": "int64_contents"}


class KServeService:
    """The service of the protocol. Its methods raise errors that `guard` turns into statuses."""

    def __init__(self, api: ApiServer, running: Running) -> None:
        self._api, self._running = api, running

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=ready(self._api))

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        found = self._api.served.get(request.name)
        known = found is not None and request.version in ("", found.version)
        return pb.ModelReadyResponse(ready=known and ready(self._api))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="ridgeline", version=__version__)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        told = model_of(self._api, request.name, request.version).metadata()
        tensor = pb.ModelMetadataResponse.TensorMetadata
        for side in ("inputs", "outputs"):
            told[side] = [tensor(**each) for each in told[side]]
        return pb.ModelMetadataResponse(**told)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        told = model_of(self._api, request.name, request.version).config()
        return pb.ModelConfigResponse(config=ParseDict(told, pb.ModelConfig()))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        told = kserve.statistics_of(self._api, request.name, request.version)
        return ParseDict(told, pb.ModelStatisticsResponse())

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if parameters_of(request).get("stream"):
            raise BadRequest("ModelInfer answers once; use ModelStreamInfer for pieces.", param="stream")
        model = model_of(self._api, request.model_name, request.model_version)
        with self._api.inferences.of(model.name) as inference:
            [part] = [part async for part in self._answered(model, request, inference, context, streamed=False)]
            return response_with(model, request, part, final=model.generates or None)

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
        model = model_of(self._api, request.model_name, request.model_version)
        with self._api.inferences.of(model.name) as inference:
            async with aclosing(self._answered(model, request, inference, context, streamed=True)) as parts:
                async for part in parts:
                    with inference.response(empty=part.empty):
                        yield response_with(model, request, part, final=part.facts is not None)

    async def _answered(
        self,
        model: ServedModel,
        request: pb.ModelInferRequest,
        inference: Inference,
        context: Context,
        *,
        streamed: bool,
    ) -> AsyncGenerator[InferenceAnswer]:
        parameters = parameters_of(request)
        asked = InferenceAsked.of(
            model, value_in(model, request), parameters, request_id_of(context), streamed=streamed
        )
        prepared = await kserve.prepared(self._api, asked)
        prepared = prepared and within(prepared, timeout=None, context=context)
        known = partial(self._running.known, context=context)
        async with aclosing(kserve.answered(self._api, asked, prepared, inference, known)) as parts:
            async for part in parts:
                yield part


def value_in(model: ServedModel, request: pb.ModelInferRequest) -> Value:
    """Return the request's input. Raise BadRequest, also for an output that there is not."""
    check_outputs(model, (output.name for output in request.outputs))
    return kserve.value_of(model, tensors_of(request))


def parameters_of(request: pb.ModelInferRequest) -> dict[str, Any]:
    """Return the request's parameters by name."""
    found = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise BadRequest(f"parameter {name[:200]!r} has no value; set one or leave it out.", param=name)
        found[name] = getattr(parameter, kind)
    return found


def tensors_of(request: pb.ModelInferRequest) -> list[Tensor]:
    """Return the inputs, whichever field holds their elements."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        name = request.inputs[0].name if len(request.inputs) == 1 else "inputs"
        raise BadRequest(f"{len(raw)} raw_input_contents came for {len(request.inputs)} inputs.", param=name)
    found = []
    for index, tensor in enumerate(request.inputs):
        if raw and tensor.HasField("contents"):
            message = f"{tensor.name[:50]} has both contents and raw_input_contents; send one of them."
            raise BadRequest(message, param=tensor.name)
        if raw:
            found.append(kserve.unpacked(tensor.name, tensor.datatype, tensor.shape, raw[index]))
        else:
            elements = getattr(tensor.contents, CONTENTS.get(tensor.datatype, "bytes_contents"))
            found.append(Tensor(tensor.name, tensor.datatype, tensor.shape, elements))
    return found


def response_with(
    model: ServedModel, request: pb.ModelInferRequest, part: InferenceAnswer, *, final: bool | None
) -> pb.ModelInferResponse:
    """Return the response with this output, if there is one, as raw bytes if the request was raw. The last one of a run
    says why it ended, and its usage. `final` says if it is its request's last one, as Triton does in streams."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=model.version, id=request.id)
    for name, told in (part.facts or {}).items():
        if isinstance(told, str):
            response.parameters[name].string_param = told
        else:
            response.parameters[name].int64_param = told
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    value, spec = part.value, model.output
    if value is None:
        return response
    output = response.outputs.add(name=spec.name, datatype=spec.datatype, shape=kserve.shape_of(model, value))
    if request.raw_input_contents:
        response.raw_output_contents.append(kserve.packed(spec, value))
    else:
        elements = [value.encode()] if isinstance(value, str) else value
        getattr(output.contents, CONTENTS[spec.datatype]).extend(elements)
    return response


def error_response(request: pb.ModelInferRequest, failure: RequestFailed) -> pb.ModelStreamInferResponse:
    told = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    return pb.ModelStreamInferResponse(error_message=failure.message, infer_response=told)
