"""The process of one rank of a divided model.

    python -m ridgeline.rank_process DESCRIPTOR LEADER

LEADER is the number of the leader's process. DESCRIPTOR is an end of a pair of sockets that the leader made
(`ranks/leader.py`), over which it says everything else. Standard input is a pipe that closes when the leader is gone.
"""

from __future__ import annotations

import logging
import os
import sys

from ridgeline.ranks.orphan import end_with_leader


def main() -> None:
    descriptor, leader = map(int, sys.argv[1:])
    end_with_leader(leader, sys.stdin.fileno())
    # here, because torch takes seconds to import, or minutes where memory is short, and the leader may die meanwhile
    from ridgeline.assembly.rank import assemble_rank
    from ridgeline.ranks.rank import run

    run(descriptor, assemble_rank)
    logging.shutdown()
    os._exit(0)  # all is done; were the interpreter to end around torch's threads, now and then one would abort


if __name__ == "__main__":
    main()
