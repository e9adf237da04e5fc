"""Weights that arrive while an engine's first steps are tried.

A start waits for two things that have nothing to do with each other: for the copy of the weights, whose threads need
Python little, and for the first steps, which are Python, and for which any numbers will do. So a thread loads, and the
steps run on zeros, or on what has arrived.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from ridgeline.assembly.choices import Choices
from ridgeline.layers.decoder import Decoder
from ridgeline.weights.loader import Progress, stored_as

# Seconds that a thread may keep Python's lock: by default it is 0.005, and threads that copy ask for it often
SWITCH_SECONDS = 0.0005


class _ShortTurns:
    """Short turns with Python's lock, which belong to the process: they end with the last thread that loads."""

    def __init__(self) -> None:
        self._lock, self._threads, self._before = threading.Lock(), 0, 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._threads:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_SECONDS, self._before))
            self._threads += 1

    def end(self) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                sys.setswitchinterval(self._before)


_TURNS = _ShortTurns()


class LoadingStopped(Exception):
    """The start was given up while weights were loaded."""


class LoadingWeights:
    """A thread that loads weights. `finish` or `stop` must follow.

    load: loads them, and calls what it is given again and again with what is done and the fraction.
    progress: is called so, too.
    """

    def __init__(self, load: Callable[[Progress], None], progress: Progress | None) -> None:
        self._stopped, self._progress = threading.Event(), progress
        self._ended = False
        _TURNS.begin()
        self._pool = ThreadPoolExecutor(1, "ridgeline-weights")
        self._loaded: Future[None] = self._pool.submit(load, self._tell)

    def _tell(self, what: str, fraction: float) -> None:
        if self._stopped.is_set():
            raise LoadingStopped
        if self._progress is not None:
            self._progress(what, fraction)

    def finish(self) -> None:
        """Wait until all weights are on the device. Raise what loading raised."""
        try:
            self._loaded.result()
        except BaseException:  # Ctrl-C comes here, too
            self._stopped.set()
            raise
        finally:
            self._pool.shutdown()
            if not self._ended:
                self._ended = True
                _TURNS.end()

    def stop(self) -> None:
        """Stop loading, and wait for the thread. What it raised is not raised here."""
        self._stopped.set()
        with suppress(Exception):
            self.finish()


def loads_beside(choices: Choices, decoder: Decoder) -> bool:
    """Return True if steps may run while this network's weights are loaded: on one GPU, where no number of the weights
    decides what is done, where the network needs nothing of them but their place, and where loading takes no memory of
    the device: the files have the same types."""
    config = choices.config
    alone = choices.captured and choices.captures_later and choices.early is not None
    plain = config.load_format != "dummy" and not choices.forms and choices.scheme.name == "plain"
    others = (config.enable_lora, config.enable_sleep_mode, config.host_bytes, choices.draft, choices.below)
    cached = config.kv_cache_dtype == "auto"  # levels have scales, which come with the weights
    if not alone or not plain or any(others) or choices.senses or not cached or not decoder.keeps_weights:
        return False
    return stored_as(choices.folder, choices.dtype)  # others would be converted on the device
