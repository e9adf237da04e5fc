"""Several models on as few devices as hold them: bin packing by memory.

A model needs its weights, room for one step, and cache for some requests; what is left on its device is more cache for
all models there. Best fit decreasing puts each model, the largest first, onto the fullest device that holds it, and
never takes more than 11/9 of the fewest devices, and one (Johnson 1973). Up to `EXACT` models all packings are tried
with that as a bound, so the answer is the fewest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.planner import Deployment, Plan

EXACT = 12


class Item(NamedTuple):
    """A model to place, and the bytes that it needs at least."""

    name: str
    need: float


@dataclass(frozen=True)
class Packed:
    """The models of each device, by their numbers. fewest: a bound below which no packing is. proven: it is reached, or
    all packings were tried."""

    devices: list[list[int]]
    fewest: int
    proven: bool


def need_of(deployment: Deployment, requests: int) -> float:
    """Return the bytes that a deployment's model needs to run so many requests on one device. Raise InvalidConfig if a
    device is too small."""
    plan = Plan(deployment)
    if plan.max_requests < requests:
        raise InvalidConfig(
            f"one {deployment.hardware.name} has room for {plan.max_requests} requests of {deployment.context} tokens, "
            f"not for {requests}; divide this model with --tp, and pack the others."
        )
    return plan.weights + plan.activations + requests * plan.kv_per_request


def packed(needs: Sequence[float], size: float) -> Packed:
    """Return a packing into devices of that size. Raise InvalidConfig if one need is larger."""
    if needs and max(needs) > size:
        raise InvalidConfig(f"a model needs {max(needs) / 1e9:.1f} GB, and a device has {size / 1e9:.1f} GB to use.")
    order = sorted(range(len(needs)), key=lambda number: -needs[number])
    found, fewest = _best_fit(needs, order, size), math.ceil(sum(needs) / size - 1e-9)
    exact = len(needs) <= EXACT
    while exact and len(found) > fewest:
        better = _within(needs, order, size, len(found) - 1)
        if better is None:
            break
        found = better
    return Packed(found, fewest, exact or len(found) == fewest)


def shares(item_needs: Sequence[float], size: float, memory: float) -> list[float]:
    """Return for the models of one device the share of its memory that each may use: its need, and of what is left a
    part as large."""
    total = sum(item_needs)
    return [need * size / total / memory for need in item_needs]


def _best_fit(needs: Sequence[float], order: Sequence[int], size: float) -> list[list[int]]:
    devices: list[list[int]] = []
    room: list[float] = []
    for number in order:
        fits = [device for device, left in enumerate(room) if needs[number] <= left]
        if fits:
            chosen = min(fits, key=lambda device: room[device])
        else:
            chosen = len(devices)
            devices.append([])
            room.append(size)
        devices[chosen].append(number)
        room[chosen] -= needs[number]
    return devices


def _within(needs: Sequence[float], order: Sequence[int], size: float, count: int) -> list[list[int]] | None:
    """Return a packing into so many devices, or None if there is none."""
    devices: list[list[int]] = [[] for _ in range(count)]
    room = [size] * count

    def place(at: int) -> bool:
        if at == len(order):
            return True
        tried: set[float] = set()
        for device in range(count):
            left = room[device]
            if needs[order[at]] > left or left in tried:  # devices with equal room are alike
                continue
            tried.add(left)
            devices[device].append(order[at])
            room[device] -= needs[order[at]]
            if place(at + 1):
                return True
            devices[device].pop()
            room[device] = left
        return False

    return [device for device in devices if device] if place(0) else None


def items_of(deployments: Sequence[tuple[str, Deployment, int]], requests: int) -> list[Item]:
    """Return the items of named deployments, each as often as it is wanted. Raise InvalidConfig for one that does not
    fit."""
    found = []
    for name, deployment, copies in deployments:
        try:
            need = need_of(replace(deployment, tp=1, pp=1, ep=1, cp=1), requests)
        except InvalidConfig as error:
            raise InvalidConfig(f"{name} cannot be packed: {error}") from error
        found += [Item(name, need)] * copies
    return found
