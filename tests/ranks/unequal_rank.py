"""A rank that finds as many bytes free as $RANK_MEMORY says, which has a number for each rank. It notes in the folder
$RANK_NOTES how many blocks it would have alone. It stands in for `ridgeline.rank_process`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ridgeline.assembly import device
from ridgeline.assembly.rank import assemble_rank
from ridgeline.parallel.mesh import Mesh
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.rank import Progress, run
from ridgeline.worker import memory
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.memory import MemoryReport


def assemble(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    free, agreed = int(os.environ["RANK_MEMORY"].split()[begin.rank]), device._agreed

    def noted(report: MemoryReport, ranks: Mesh) -> MemoryReport:
        Path(os.environ["RANK_NOTES"], str(begin.rank)).write_text(str(report.layout.num_pages))
        return agreed(report, ranks)

    memory.host_memory, device._agreed = lambda: free, noted
    return assemble_rank(begin, progress)


if __name__ == "__main__":
    run(int(sys.argv[1]), assemble)
    os._exit(0)
