"""Settings of a processor that a request may replace, within bounds: `mm_processor_kwargs`, by transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import InvalidRequest
from ridgeline.media.layout import Processor

_FRAMES = (1, 1024)
# The least and largest value. Pixels are those of a picture, or of a frame or video as the family counts them.
BOUNDS: dict[str, tuple[float, float]] = {
    "min_pixels": (1, 1 << 21),
    "max_pixels": (1, 1 << 26),
    "min_frames": _FRAMES,
    "max_frames": _FRAMES,
    "num_frames": _FRAMES,
    "fps": (1e-3, 240),
}
SWITCHES = ("do_sample_frames",)
SIZES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # of `size`
VIDEOS = (*BOUNDS, *SWITCHES, "size")  # of a family that takes videos of any size


def checked_options(processor: Processor, options: object) -> Mapping[str, Any]:
    """Return a request's settings for a processor. Raise InvalidRequest for those that it does not take."""
    if not isinstance(options, Mapping):
        raise _wrong(f"mm_processor_kwargs is an object of settings, got {str(options)[:100]!r}.")
    taken: tuple[str, ...] = getattr(processor, "adjustable", ())
    if "size" in options and "size" in taken:
        if not isinstance(size := options["size"], Mapping) or size.keys() - SIZES.keys():
            raise _wrong(f"mm_processor_kwargs.size is an object of {' and '.join(SIZES)}, got {str(size)[:64]}.")
        options = {name: value for name, value in options.items() if name != "size"}
        options |= {SIZES[name]: value for name, value in size.items()}
    for name, value in options.items():
        if name not in taken:
            known = f"takes {', '.join(taken)}" if taken else "takes none"
            raise _wrong(f"mm_processor_kwargs: {str(name)[:64]!r} cannot be set in a request; this model {known}.")
        if name in SWITCHES:
            if not isinstance(value, bool):
                raise _wrong(f"mm_processor_kwargs.{name} is true or false, got {str(value)[:64]}.")
            continue
        least, most = BOUNDS[name]
        whole = isinstance(value, int) or (name == "fps" and isinstance(value, float))
        if isinstance(value, bool) or not whole or not least <= value <= most:
            raise _wrong(f"mm_processor_kwargs.{name} is a number from {least:g} to {most:g}, got {str(value)[:64]}.")
    if {"fps", "num_frames"} <= options.keys():
        raise _wrong("mm_processor_kwargs has fps and num_frames, which exclude each other; leave one of them out.")
    return options


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="mm_processor_kwargs")
