"""Training data that processes make while a model learns from it: folders of arrays, each read once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from shutil import rmtree

import numpy as np

Arrays = Mapping[str, np.ndarray]


class Makers:
    """Processes that write chunks until `close`, or as many as are wanted.

    make: a chunk from a generator of random numbers; it is called in the processes, so a module has it.
    """

    def __init__(self, folder: Path, make: Callable[[Random], Arrays], processes: int, most: int, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        context = multiprocessing.get_context("fork")
        shares = [range(first, most, processes) for first in range(processes)]
        self._processes = [
            context.Process(target=_write, args=(folder, make, share, seed), daemon=True) for share in shares if share
        ]
        for process in self._processes:
            process.start()

    def new(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the chunks that have been finished since the last call, and remove their folders."""
        for folder in sorted(self._folder.glob("*.done")):
            arrays = {file.stem: np.load(file) for file in folder.iterdir()}
            rmtree(folder)
            yield arrays

    @property
    def at_work(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _write(folder: Path, make: Callable[[Random], Arrays], share: range, seed: int) -> None:
    for number in share:
        own = folder / f"{number:06d}"
        own.mkdir()
        for name, array in make(Random(f"{seed} {number}")).items():
            np.save(own / name, array)
        own.rename(own.with_suffix(".done"))
