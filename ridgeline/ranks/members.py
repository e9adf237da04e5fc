"""All ranks' processes: the leader's messages to them, its waits for them, and its decision that they are lost.

Ranks wait for each other, so if one has died, hangs, or is the only one to fail, all are killed.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, BinaryIO

import msgspec

from ridgeline.core import errors
from ridgeline.core.errors import DeviceLost, InvalidConfig, ModelLoadError, RidgelineError
from ridgeline.core.plan.transfer import TransferFailed, WeightsTorn
from ridgeline.core.silence import Laps
from ridgeline.ranks.channel import Closed
from ridgeline.ranks.member import LOOK, Member, Progress
from ridgeline.ranks.messages import Ask, Begin, FromLeader, Mistake, Ready, TakeWeights, encode
from ridgeline.ranks.recruits import Recruits

logger = logging.getLogger(__name__)

START = 120.0  # seconds that the first one may take: a rank imports torch before it, maybe from a slow disk
BESIDE = 0.01  # seconds for which a thread that waits beside the steps may hold up the one that waits for these
KINDS = {kind.__name__: kind for kind in (InvalidConfig, TransferFailed)}  # by which ranks refuse weights
AGREEMENT = 5.0  # seconds that other ranks have to fail a plan that one has failed


class Members:
    """The processes, which start and end together. limit: seconds that a step may take. silence: seconds without a sign
    of life after which a rank is taken to hang."""

    def __init__(self, size: int, limit: float, silence: float) -> None:
        self._size, self._limit, self._silence = size, limit, silence
        self._lost: str | None = None
        self._members: list[Member] = []
        self._listening = Lock()  # held by the thread that takes what ranks send

    def _start(self, options: Mapping[str, Any], recruits: Recruits | None) -> None:
        """Let the processes begin. Those that were not started yet are."""
        recruits = recruits or Recruits(self._size)
        self._members = [Member(recruit) for recruit in recruits.each]
        place = f"/proc/self/fd/{recruits.meeting}"
        for rank in range(self._size):
            self.tell(rank, Begin(rank, self._size, place, self._limit, dict(options), self._speaks(rank)))
        os.close(recruits.meeting)

    @property
    def facts(self) -> Ready:
        """The first rank's facts, which it told when it was ready."""
        ready = self._members[0].ready
        assert ready is not None
        return ready

    @property
    def all_facts(self) -> list[Ready]:
        """The facts of every rank."""
        return [member.ready for member in self._members if member.ready is not None]

    @property
    def fingerprints(self) -> list[str]:
        """Each rank's fingerprint of the files that it read."""
        return [ready.fingerprint for ready in self.all_facts]

    def _speaks(self, rank: int) -> bool:
        """Return True if all of a rank's results are wanted, and not their outlines."""
        raise NotImplementedError

    # ---- messages ---------------------------------------------------------------------------------------------

    def _tell(self, message: FromLeader) -> None:
        """Send a message to all ranks, unless the group is lost."""
        frame = encode(message)
        for rank in range(len(self._members)):
            self._send_to(rank, frame)

    def tell(self, rank: int, message: FromLeader) -> None:
        """Send a message to one rank, unless the group is lost."""
        self._send_to(rank, encode(message))

    def _send_to(self, rank: int, frame: bytes) -> None:
        if self._lost is not None:
            return
        try:
            self._members[rank].channel.send(frame)
        except Closed:
            self._lose(f"rank {rank} {self._members[rank].how_it_ended()}")

    @property
    def lost(self) -> str | None:
        """The reason why the ranks do no work any more, or None."""
        return self._lost

    def opened(self, rank: int, number: int) -> BinaryIO:
        """Return a file that a rank has open under this number, to read and write."""
        return self._members[rank].opened(number)

    def settled_of(self, rank: int) -> int:
        """Return the newest plan that a rank has said to have settled (`Done`)."""
        return self._members[rank].settled

    def ask(self, method: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Return the answers of these ranks, or of all. Raise DeviceLost."""
        asked = self._members if ranks is None else [self._members[rank] for rank in ranks]
        for member in asked:
            self.tell(member.rank, Ask(method))
        self._wait_for(lambda: all(member.answers for member in asked))
        if self._lost is not None:
            raise DeviceLost(f"the ranks do no work any more ({self._lost}); start a new process.")
        answers = [member.answers.popleft() for member in asked]
        for answer in answers:
            if answer.error is not None:
                raise DeviceLost(answer.error)
        return [answer.value for answer in answers]

    def _order(self, message: FromLeader, limit: float) -> None:
        """Give all ranks an order, and wait until all have followed, so many seconds at most. Raise DeviceLost, and
        what a rank raises; where that differs, some have done what others have not, and it is WeightsTorn."""
        self._tell(message)
        self._wait_for(lambda: all(member.followed for member in self._members), limit)
        if self._lost is not None:
            raise DeviceLost(f"the ranks do no work any more ({self._lost}); start a new process.")
        mistakes = [member.followed.popleft().mistake for member in self._members]
        failed = [mistake for mistake in mistakes if mistake is not None]
        if torn := next((each for each in failed if each.kind == WeightsTorn.__name__), None):
            raise WeightsTorn(torn.sentence)
        if failed and len(failed) < len(mistakes) and isinstance(message, TakeWeights):
            raise WeightsTorn(f"only some ranks have new weights ({failed[0].sentence}); load the model again.")
        if failed:
            raise KINDS.get(failed[0].kind, TransferFailed)(failed[0].sentence)

    def _wait_until_ready(self, progress: Progress | None) -> None:
        """Wait until every rank has loaded. Loading may take any time, as long as ranks give signs of life."""
        while self._lost is None and not all(member.ready for member in self._members):
            self._listen(progress)
            for member in self._members:
                if member.mistake is not None:
                    raise error_of(member.mistake, f"rank {member.rank} could not begin")
        if self._lost is not None:
            raise ModelLoadError(f"the model could not be loaded on {self._size} ranks: {self._lost}.")

    def _wait_for(self, there: Callable[[], bool], limit: float | None = None) -> None:
        """Wait until something is there, or the group is lost. limit: seconds, if not those of a step."""
        limit = self._limit if limit is None else limit
        waited = failing = 0.0  # seconds, and those for which one rank has failed and the first has not
        laps = Laps(LOOK)
        while self._lost is None and not there():
            with self._listening:
                if not there():  # another thread may have heard it
                    self._listen()
            if there():  # whenever it came: the last look may be hours ago
                return
            elapsed = laps.since_last()
            waited += elapsed
            if waited > limit:
                self._lose(f"a step was not done within {limit:g} s")
            failed = next((member for member in self._members if member.failure is not None), None)
            failing = failing + elapsed if failed else 0.0
            if failed is not None and failing > AGREEMENT:
                self._lose(f"rank {failed.rank} alone failed: {failed.failure}")

    def _wait_beside(self, there: Callable[[], bool]) -> None:
        """Wait as `_wait_for` in another thread than the one that waits for steps, which can take any time meanwhile.
        What takes long is no failure."""
        while self._lost is None and not there():
            if self._listening.acquire(timeout=BESIDE):
                try:
                    if not there():
                        self._listen(wait=BESIDE)
                finally:
                    self._listening.release()
            time.sleep(BESIDE / 10)  # so that the thread of the steps gets its turn

    def _listen(self, progress: Progress | None = None, wait: float = LOOK) -> None:
        """Take what ranks have sent, after waiting so many seconds for something. Notice ranks that are gone or
        silent."""
        poll = select.poll()
        by_number = {member.channel.fileno(): member for member in self._members}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * wait):
            member = by_number[number]
            try:
                member.take_all(progress)
            except Closed:
                # Others end by themselves right behind one that was killed, and may be seen first
                first = next((each for each in self._members if each.killed), member)
                self._lose(f"rank {first.rank} {first.how_it_ended()}")
                return
            except msgspec.MsgspecError as error:
                self._lose(f"rank {member.rank} sent what is no message ({error})")
                return
        for member in self._members:
            if (silence := member.silence()) > (self._silence if member.speaks else START):
                self._lose(f"rank {member.rank} has given no sign of life for {silence:.3g} s")

    # ---- the end ----------------------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            logger.error("the group of %d ranks is lost: %s", self._size, why)
            self._end()

    def _end(self, patience: float = 0.0) -> None:
        """End the processes: those that still run after so many seconds are killed."""
        deadline = time.monotonic() + patience
        for member in self._members:
            member.end(max(0.0, deadline - time.monotonic()))


def error_of(mistake: Mistake, otherwise: str) -> RidgelineError:
    """Return the error that a rank met. otherwise: what to say in front of one that is not our own."""
    kind = getattr(errors, mistake.kind, None) if mistake.kind else None
    if isinstance(kind, type) and issubclass(kind, RidgelineError):
        return kind(mistake.sentence)
    return ModelLoadError(f"{otherwise}: {mistake.sentence}")
