"""Wires an engine to a worker: the one place that knows both."""

from ridgeline.assembly.wiring import Assembly, assemble

__all__ = ["Assembly", "assemble"]
