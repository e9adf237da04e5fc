"""A rank whose kernels run in the tests' interpreter. It stands in for `ridgeline.rank_process`."""

from __future__ import annotations

import os
import sys

from tests import interpreter

if __name__ == "__main__":
    interpreter.patch_once()
    from ridgeline.assembly.rank import assemble_rank
    from ridgeline.ranks.rank import run

    run(int(sys.argv[1]), assemble_rank)
    os._exit(0)
