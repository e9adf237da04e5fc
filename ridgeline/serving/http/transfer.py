"""Routes by which a trainer sends weights into the engines. Names and bodies are vLLM's, as TRL's client has them.

All of them ask for the admin key (middleware.py), and are there with `--weight-transfer` alone. The bytes come beside
HTTP, to every worker at once (`core.plan.transfer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address, ip_network

from fastapi import APIRouter, Request

from ridgeline.core.plan.transfer import BUFFER_BYTES
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http.exchange import read_body
from ridgeline.serving.http.rest import REFUSED, NotAllowed, NotObeyed
from ridgeline.serving.requests.bodies import (
    FinishWeightsBody,
    InitTransferBody,
    StartWeightsBody,
    UpdateWeightsBody,
)
from ridgeline.transport.messages import BeginWeights, EndWeights, MeetTrainer, Standing, TakeWeights, WeightOrder

TIMEOUT = 1800.0  # seconds for an order, of which each wait for the trainer has its own bound
MOST_RANKS = 4096
CLOSED = (
    "weights are not sent to this server; start it with --weight-transfer RANGE, for the addresses of trainers, and "
    "--admin-key KEY (docs/weight-transfer.md)."
)


class TransferClosed(BadRequest):
    status, code = 404, "weight_transfer_needed"


def router(api: ApiServer) -> APIRouter:
    """Return the routes GET /get_world_size and /weight_info, and POST /init_weight_transfer_engine,
    /start_weight_update, /update_weights and /finish_weight_update."""
    routes = APIRouter(tags=["operator"])
    answers = {**REFUSED, 404: {**REFUSED[400], "description": "There is no --weight-transfer"}}

    async def order(message: WeightOrder) -> Standing:
        standing = await api.client.order(message, TIMEOUT)
        if standing.error:
            raise NotObeyed(standing.error)
        return standing

    def check() -> None:
        if not api.config.weight_transfer:
            raise TransferClosed(CLOSED)
        if len(api.beside) > 1:
            raise NotObeyed("the models of this server take turns, and weights are sent to a server of one model.")

    @routes.get("/get_world_size", summary="The workers that weights are sent to", responses=answers)
    async def get_world_size(include_dp: bool = True) -> dict[str, int]:
        check()
        return {"world_size": (len(api.client.engines) if include_dp else 1) * api.service.facts().ranks}

    @routes.get("/weight_info", summary="The version of the weights", responses=answers)
    async def weight_info() -> dict[str, str]:
        check()
        return {"weight_version": api.service.facts().weight_version}

    @routes.post("/init_weight_transfer_engine", summary="Join a trainer's group", responses=answers)
    async def init_weight_transfer_engine(request: Request) -> dict[str, str]:
        check()
        given = (await read_body(request, InitTransferBody)).init_info
        address = checked(given.master_address, api.config.weight_transfer)
        workers = len(api.client.engines) * api.service.facts().ranks
        if not given.rank_offset + workers <= given.world_size <= MOST_RANKS:
            raise BadRequest(
                f"world_size is {given.world_size}, and must be rank_offset {given.rank_offset} and {workers} workers "
                f"or more, up to {MOST_RANKS}.",
                param="init_info.world_size",
            )
        size = given.packed_buffer_size_bytes or BUFFER_BYTES
        await order(
            MeetTrainer(
                mode="keep",
                address=address,
                port=given.master_port,
                rank=given.rank_offset,
                size=given.world_size,
                limit=api.config.weight_transfer_timeout,
                buffer_bytes=size if given.packed else 0,
            )
        )
        return {"message": "Weight transfer initialized"}

    @routes.post("/start_weight_update", summary="Begin no further step until weights have come", responses=answers)
    async def start_weight_update(request: Request) -> dict[str, str]:
        check()
        if await request.body():
            await read_body(request, StartWeightsBody)
        await order(BeginWeights(mode="keep"))
        return {"message": "Weight update started"}

    @routes.post("/update_weights", summary="Receive tensors", responses=answers)
    async def update_weights(request: Request) -> dict[str, str]:
        check()
        given = (await read_body(request, UpdateWeightsBody)).update_info
        size: int | None = None
        if given.packed is not None:
            size = (given.packed_buffer_size_bytes or BUFFER_BYTES) if given.packed else 0
        taken = TakeWeights(
            mode="keep", names=given.names, dtypes=given.dtype_names, shapes=given.shapes, buffer_bytes=size
        )
        await order(taken)
        return {"message": "Weights updated"}

    @routes.post("/finish_weight_update", summary="Let the new weights serve", responses=answers)
    async def finish_weight_update(request: Request) -> dict[str, str]:
        check()
        version = (await read_body(request, FinishWeightsBody)).weight_version if await request.body() else None
        await order(EndWeights(mode="keep", version=version or ""))
        return {"message": "Weight update finished", "weight_version": api.service.facts().weight_version}

    return routes


def checked(address: str, ranges: Sequence[str]) -> str:
    """Return a trainer's address as text. Raise BadRequest for what is no number of a machine (a name may stand for
    another one at the next look), and NotAllowed for one in none of the ranges."""
    try:
        found = ip_address(address)
    except ValueError:
        raise BadRequest(
            f"master_address is {address[:80]!r}; send the number of the trainer's machine, as 10.0.0.5.",
            param="init_info.master_address",
        ) from None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if not any(found in ip_network(each) for each in ranges):
        raise NotAllowed(f"master_address {found} is in none of the ranges of --weight-transfer.")
    return str(found)
