"""The count of numbers that a checkpoint's scales for its KV cache could not hold, read beside the device's work."""

from __future__ import annotations

import torch

from ridgeline.layers.decoder import Decoder


class Saturation:
    """The counts of all layers whose scales are the checkpoint's. Rows with scales of their own saturate nowhere."""

    def __init__(self, decoder: Decoder) -> None:
        mixers = (layer.mixer for layer in decoder.layers)
        counters = (getattr(mixer, "saturated_1", None) for mixer in mixers)
        self._counters = [counter for counter in counters if counter is not None]
        device = self._counters[0].device if self._counters else None
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def read(self) -> int:
        """Return the numbers beyond the largest level so far. It waits for a copy of its own, and for no step."""
        if self._stream is None:
            return sum(int(counter) for counter in self._counters)
        with torch.cuda.stream(self._stream):
            return int(torch.cat(self._counters).sum())
