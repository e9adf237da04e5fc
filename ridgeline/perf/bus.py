"""Copies between a device and the host's memory: the rate of the bus, and what a tier of the cache there is worth."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.perf.hardware import Hardware

RATE = 25e9  # B/s of a bus that is not known
ATTAINED = 0.8  # of a bus's stated rate; no device's was measured yet


def bus_rate(hardware: Hardware | None) -> float:
    """Return the bytes a second that the device gets from the host."""
    return RATE if hardware is None or hardware.pcie is None else ATTAINED * hardware.pcie


class TierRoom(NamedTuple):
    """The tier in the host's memory beside one device.

    blocks: that it holds. tokens: those that one prompt's blocks have. load, run: seconds until these are back on the
    device, and until they have run anew.
    """

    blocks: int
    tokens: int
    load: float
    run: float
