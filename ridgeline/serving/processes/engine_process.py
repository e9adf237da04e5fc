"""The process of the engine.

    python -m ridgeline.serving.processes.engine_process < settings

It reads one JSON object (`EngineSettings`) from standard input and ends when that closes, because then its parent is
gone. It says `ready` on standard output once API servers can reach it.

This module holds the part that runs before torch, which takes seconds to import. The ranks of a divided model import it
at the same time.
"""

from __future__ import annotations

import gc
import os

from ridgeline.core.collector import no_garbage_collection
from ridgeline.core.errors import RidgelineError
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.timeline import Timeline
from ridgeline.ranks.recruits import Recruits
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.serving.processes.lifeline import begin, tell_mistake
from ridgeline.serving.processes.logs import set_up_logging
from ridgeline.serving.processes.pulse import Patience
from ridgeline.worker.early import Early

EARLY = 16  # ranks that are started before it is known that there is room for them
# torch and oneDNN each keep 1024 shapes in their caches of compiled products. An entry takes a quarter of a megabyte,
# so the caches of a CPU's server whose load varies would grow for hours. Here each keeps half as many.
KEPT_SHAPES = {"LRU_CACHE_CAPACITY": "512", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512"}


def main() -> None:
    settings, pulse, _ = begin(EngineSettings)
    timeline = Timeline.of_child(settings.began if settings.life == 1 else None)
    set_up_logging(as_json=settings.log_json, level=settings.log_level, process=settings.name)
    os.environ.update(KEPT_SHAPES | os.environ)
    try:
        ranks = (config := LLMConfig(**settings.options)).ranks
        recruits = Recruits(ranks) if 1 < ranks <= EARLY and settings.turn is None else None
        early = Early(config) if settings.turn is None else None
    except RidgelineError as error:
        tell_mistake(error)
    with timeline.stage("imports"), no_garbage_collection(), pulse.deaf(Patience.start):  # maybe from a slow disk
        from ridgeline.serving.processes.engine_host import run  # here, because it imports torch
    gc.freeze()  # a start makes much that stays, and no collection of it would visit torch's modules again
    run(settings, pulse, recruits, timeline, early)


if __name__ == "__main__":
    main()
