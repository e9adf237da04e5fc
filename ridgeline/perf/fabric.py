"""Networks between hosts, on paper: fat trees and dragonflies of InfiniBand switches, and what collectives take over
them. Nothing here was measured; every figure is arithmetic over the makers' rates and the assumptions below.

A host has G devices, each with a port of its own into the network, of which all first ports are one rail, and so on.

* **Fat tree** (Leiserson 1985; Al-Fares et al., SIGCOMM 2008): L levels of switches with r ports join up to
  2 (r / 2)^L endpoints with (2 L - 1) / r switches an endpoint. The farthest message passes 2 L - 1 switches.
* **Dragonfly** (Kim et al., ISCA 2008): a = 2 p = 2 h, so r = 4 p - 1 ports: p to endpoints, a - 1 within the group, h
  to other groups, of which there are up to a h + 1. The farthest message passes 4 switches, and one long cable.

Both can be tapered: with 2 : 1, links between leaves, or between groups, have half the bandwidth of their endpoints.

An all-reduce of n bytes sums within each host first, so each port carries n / G (N hosts, B bytes/s a port):

    ring    2 (N - 1) messages one after the other, 2 (N - 1) / N · n / G bytes
    tree    2 log2 N messages one after the other, 2 · n / G bytes (Sanders et al., Parallel Computing 35(12), 2009)
    SHARP   the switches add (Graham et al., COMHPC 2016): one message up and down, n / G bytes. The sum arrives whole,
            so no endpoint merges parts, and the bytes are half of a ring's

Its messages go between neighbours, so a taper does not slow it down. In an all-to-all of D devices every port sends
(D - G) / D of its n bytes away from its host; what leaves the leaf, or the group, is slowed down by the taper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.footprint import check_shape
from ridgeline.perf.links import Links

TOPOLOGIES = ("fat-tree", "dragonfly")
OPS = ("all_reduce", "all_to_all")
# Assumed: the start of a collective, as NCCL's over NVLink; a message between hosts, with NCCL's part; a switch.
START, MESSAGE, SWITCH = 14.5e-6, 5e-6, 0.2e-6


class Generation(NamedTuple):
    """A generation of InfiniBand. rate: B/s of a port, one way. radix: ports of a switch."""

    name: str
    rate: float
    radix: int


# NVIDIA's figures: four lanes a port; Quantum (HDR), Quantum-2 (NDR) and Quantum-X800 (XDR) switches.
GENERATIONS = {
    "hdr": Generation("HDR", 200e9 / 8, 40),
    "ndr": Generation("NDR", 400e9 / 8, 64),
    "xdr": Generation("XDR", 800e9 / 8, 144),
}


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A network of so many endpoints: one of each device. taper: by what the outer links have less."""

    topology: str
    generation: Generation
    endpoints: int
    taper: float = 1.0

    def __post_init__(self) -> None:
        check_shape(endpoints=self.endpoints)
        if self.topology not in TOPOLOGIES:
            raise InvalidConfig(f"unknown topology {self.topology!r}; use {', '.join(TOPOLOGIES)}.")
        if not 1 <= self.taper < float("inf"):
            raise InvalidConfig(f"taper must be at least 1, got {self.taper!r}.")
        if self.endpoints > self.most:
            raise InvalidConfig(
                f"a {self.topology} of switches with {self.generation.radix} ports joins at most {self.most:,} "
                f"endpoints, not {self.endpoints:,}."
            )

    @property
    def most(self) -> int:
        """The most endpoints of this topology; a fat tree is given three levels."""
        radix, p = self.generation.radix, self._ports
        return 2 * (radix // 2) ** 3 if self.topology == "fat-tree" else 2 * p * p * (2 * p * p + 1)

    @property
    def _ports(self) -> int:
        """The endpoints of a dragonfly's switch."""
        return (self.generation.radix + 1) // 4

    @property
    def levels(self) -> int:
        """The levels of a fat tree; 0 of a dragonfly."""
        if self.topology == "dragonfly":
            return 0
        half = self.generation.radix // 2
        if self.endpoints <= self.generation.radix:
            return 1
        return next(level for level in (2, 3) if self.endpoints <= 2 * half**level)

    @property
    def local(self) -> int:
        """The endpoints of a leaf of a fat tree, or of a group of a dragonfly, between which a taper does not count."""
        if self.topology == "dragonfly":
            return 2 * self._ports**2
        return self.endpoints if self.levels == 1 else self.generation.radix // 2

    @property
    def switches(self) -> int:
        """The number of switches, without a taper."""
        if self.topology == "dragonfly":
            return math.ceil(self.endpoints / self._ports)
        return math.ceil((2 * self.levels - 1) * self.endpoints / self.generation.radix)

    @property
    def passed(self) -> int:
        """The switches that the farthest message passes."""
        if self.topology == "dragonfly":
            return 4 if self.endpoints > self.local else 2
        return 2 * self.levels - 1

    @property
    def bisection(self) -> float:
        """The bytes a second that one half of the endpoints can send to the other."""
        taper = self.taper if self.endpoints > self.local else 1.0
        return self.endpoints / 2 * self.generation.rate / taper

    @property
    def message(self) -> float:
        """The seconds of the farthest message, without its bytes."""
        return MESSAGE + self.passed * SWITCH


class Way(NamedTuple):
    """A form of a collective, and its seconds: within hosts, and between them."""

    name: str
    inside: float
    between: float

    @property
    def total(self) -> float:
        return self.inside + self.between


def ways(fabric: Fabric, op: str, nbytes: float, *, per_host: int, links: Links) -> list[Way]:
    """Return the ways of a collective over all endpoints, `per_host` of which are in each host and joined by `links`,
    fastest first. nbytes: as in `perf.links`. Raise InvalidConfig for an unknown op, or for hosts that are not full."""
    check_shape(per_host=per_host)
    if op not in OPS:
        raise InvalidConfig(f"{op!r} is not computed over a network; use {', '.join(OPS)}.")
    if fabric.endpoints % per_host:
        raise InvalidConfig(f"{fabric.endpoints} devices are no whole hosts of {per_host}; choose a multiple.")
    hosts = fabric.endpoints // per_host
    if hosts == 1:
        return [Way("one host", links.seconds(op, per_host, nbytes), 0.0)]
    found = _reduced(fabric, nbytes, hosts, per_host, links) if op == "all_reduce" else [
        _exchanged(fabric, nbytes, per_host, links)
    ]  # fmt: skip
    return sorted(found, key=lambda way: way.total)


def _reduced(fabric: Fabric, nbytes: float, hosts: int, per_host: int, links: Links) -> list[Way]:
    inside = sum(links.seconds(op, per_host, nbytes) for op in ("reduce_scatter", "all_gather"))
    part, rate, steps = nbytes / per_host, fabric.generation.rate, math.log2(hosts)
    rounds = {
        "ring": (2 * (hosts - 1) * fabric.message, 2 * (hosts - 1) / hosts),
        "tree": (2 * math.ceil(steps) * fabric.message, 2.0),
        "SHARP": (2 * fabric.message, 1.0),
    }
    return [Way(name, inside, START + wait + factor * part / rate) for name, (wait, factor) in rounds.items()]


def _exchanged(fabric: Fabric, nbytes: float, per_host: int, links: Links) -> Way:
    """Return an all-to-all, whose messages within hosts go at the same time; the slower of both counts."""
    devices, rate = fabric.endpoints, fabric.generation.rate
    away = nbytes * (devices - per_host) / devices / rate
    far = nbytes * max(0, devices - fabric.local) / devices * fabric.taper / rate
    between = START + fabric.message + max(away, far)
    inside = links.seconds("all_to_all", per_host, nbytes * per_host / devices)
    return Way("all at once", max(0.0, inside - between), between)
