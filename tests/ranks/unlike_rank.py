"""A rank that takes the CPU for every GPU that is named, so that stages on unlike devices run where there is no GPU. It
stands in for `ridgeline.rank_process`."""

from __future__ import annotations

import os
import sys

import torch

from ridgeline.assembly import rank
from ridgeline.core.settings.config import LLMConfig
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.rank import Progress, run
from ridgeline.worker.local import LocalWorker


def on_the_cpu(config: LLMConfig, number: int) -> torch.device:
    return torch.device("cpu")


def assemble(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    rank.device_of_rank = on_the_cpu
    return rank.assemble_rank(begin, progress)


if __name__ == "__main__":
    run(int(sys.argv[1]), assemble)
    os._exit(0)
