"""Failed plans: the work that they leave, and the requests that may be to blame.

Nothing that a failed plan promised is trusted: the plans in flight drain, the blocks they published are withdrawn,
every running request is preempted and the next plan resets the worker. The requests of the failed plan are suspects
and run alone, one per plan, until each has given a token or failed again, which ends that request only.
"""

from __future__ import annotations

from ridgeline.engine.cache.prefix import Hash
from ridgeline.engine.plan_builder import InFlight
from ridgeline.engine.sequence import Sequence, Status


class Recovery:
    """failed: plans that failed, or were dropped after one that did, and are not yet made up for. suspects: an ordered
    set of requests that must run alone. reset: the next plan must tell the worker to forget everything; so must the
    first, which finds a worker in an unknown state."""

    def __init__(self) -> None:
        self.failed: list[InFlight] = []
        self.suspects: dict[Sequence, None] = {}
        self.reset = True

    def note(self, record: InFlight, *, blame: bool) -> Sequence | None:
        """Note a plan that did not run. blame: one of its requests may be the cause; all become suspects. Return the
        request that is the cause for certain, because it was a suspect and ran alone, if there is one."""
        self.failed.append(record)
        if not blame:
            return None
        alive = list(dict.fromkeys(seq.leader for seq in record.seqs if seq.leader.status is not Status.FINISHED))
        if len(alive) == 1 and alive[0] in self.suspects:
            return alive[0]
        self.suspects.update(dict.fromkeys(alive))
        return None

    def start_over(self) -> list[list[Hash]]:
        """Forget the failed plans. Return the hashes that they published, whose blocks were never written."""
        published = [record.published for record in self.failed]
        self.failed.clear()
        self.reset = True
        return published
