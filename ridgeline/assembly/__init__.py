"""Wires an engine to a worker: the one place that knows both."""

from ridgeline.assembly.assemble import Assembly, assemble

__all__ = ["Assembly", "assemble"]
