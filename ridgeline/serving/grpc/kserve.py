"""The Open Inference Protocol (KServe v2), for a model with one text in and one text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from google.protobuf.json_format import ParseDict
from grpc.aio import ServicerContext as Context

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, RequestFailed
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.grpc.generate import within
from ridgeline.serving.grpc.guard import failure_of, request_id_of
from ridgeline.serving.grpc.health import ready
from ridgeline.serving.grpc.proto import kserve_pb2 as pb
from ridgeline.serving.grpc.running import Running
from ridgeline.serving.repository.models import ServedModel
from ridgeline.serving.requests import kserve
from ridgeline.serving.requests.kserve import Tensor, Value, check_outputs, model_of
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
        parameters = parameters_of(request)
        if parameters.get("stream"):
            raise BadRequest("ModelInfer answers once; use ModelStreamInfer for pieces.", param="stream")
        model = model_of(self._api, request.model_name, request.model_version)
        with self._api.inferences.of(model.name) as inference:
            kserve.takes_empty_final(parameters)  # one response is never empty
            value = value_in(model, request)
            if not model.generates:
                inference.computes()
                return response_with(model, request, await kserve.converted(self._api, model, value, parameters))
            async with self._api.service.run(await self._asked(model, value, parameters, context)) as run:
                inference.run = run
                with self._running.known(run, context):
                    await run.finish()
            return last_response(model, request, run, kserve.result_of(model, run.result.outputs[0]))

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
        model, parameters = model_of(self._api, request.model_name, request.model_version), parameters_of(request)
        with self._api.inferences.of(model.name) as inference:
            without_output = kserve.takes_empty_final(parameters)
            value = value_in(model, request)
            if not model.generates:
                inference.computes()
                response = response_with(model, request, await kserve.converted(self._api, model, value, parameters))
                with inference.response():
                    yield with_final(response, final=True)
                return
            asked = await self._asked(model, value, parameters, context)
            streams = kserve.streams(asked, parameters)
            async with self._api.service.run(asked) as run:
                inference.run = run
                with self._running.known(run, context):
                    async for piece in run:
                        if streams and (found := kserve.result_of(model, piece)):
                            with inference.response():
                                yield with_final(response_with(model, request, found), final=False)
            whole = kserve.result_of(model, run.result.outputs[0])
            rest = (None if without_output else type(whole)()) if streams else whole
            with inference.response(empty=streams):
                yield last_response(model, request, run, rest)

    async def _asked(
        self, model: ServedModel, value: Value, parameters: dict[str, Any], context: Context
    ) -> GenerationRequest:
        asked, timeout = await kserve.generation(self._api, model, value, parameters, request_id_of(context))
        return within(asked, timeout=timeout, context=context)


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


def response_with(model: ServedModel, request: pb.ModelInferRequest, value: Value | None) -> pb.ModelInferResponse:
    """Return the response with this output, as raw bytes if the request was raw, or without one."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=model.version, id=request.id)
    if value is None:
        return response
    spec = model.output
    output = response.outputs.add(name=spec.name, datatype=spec.datatype, shape=kserve.shape_of(model, value))
    if request.raw_input_contents:
        response.raw_output_contents.append(kserve.packed(spec, value))
    else:
        elements = [value.encode()] if isinstance(value, str) else value
        getattr(output.contents, CONTENTS[spec.datatype]).extend(elements)
    return response


def last_response(
    model: ServedModel, request: pb.ModelInferRequest, run: Run, value: Value | None
) -> pb.ModelInferResponse:
    """Return the last response of a run: why it ended, and its usage."""
    response = response_with(model, request, value)
    for name, told in kserve.told(run).items():
        if isinstance(told, str):
            response.parameters[name].string_param = told
        else:
            response.parameters[name].int64_param = told
    return with_final(response, final=True)


def with_final(response: pb.ModelInferResponse, *, final: bool) -> pb.ModelInferResponse:
    """Return the response with a parameter that says if it is its request's last one, as Triton does in streams."""
    response.parameters["triton_final_response"].bool_param = final
    return response


def error_response(request: pb.ModelInferRequest, failure: RequestFailed) -> pb.ModelStreamInferResponse:
    told = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    return pb.ModelStreamInferResponse(error_message=failure.message, infer_response=told)
