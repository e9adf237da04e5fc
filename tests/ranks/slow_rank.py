"""A rank of which the second one is slow: it sleeps before every layer. It stands in for `ridgeline.rank_process`."""

from __future__ import annotations

import os
import sys
import time

from ridgeline.assembly.rank import assemble_rank
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.rank import Progress, run
from ridgeline.worker.local import LocalWorker

SLEEP = 0.03  # seconds; far more than a layer of a tiny model takes, and than others on the machine hold a rank up


def assemble(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    worker, ready = assemble_rank(begin, progress)
    if begin.rank == 1:
        for layer in worker.runner.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(SLEEP))
    return worker, ready


if __name__ == "__main__":
    run(int(sys.argv[1]), assemble)
    os._exit(0)
