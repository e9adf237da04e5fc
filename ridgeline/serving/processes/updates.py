"""The course of an update of weights: it is begun, tensors are taken, and it is ended. Meanwhile no step runs.

Until the first tensor is written the update can be given up, and the old weights are whole. From then on it ends with a
new version, or ends the engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import replace

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import RequestStats, WeightSpan
from ridgeline.core.plan.transfer import Announced, Meeting, TakesWeights, WeightsTorn
from ridgeline.serving.processes.loaded import Loaded
from ridgeline.transport.messages import BeginWeights, EndWeights, MeetTrainer, Pause, TakeWeights

FIRST = "0"  # the version of the files' weights


class Updates:
    """The update that is under way, if one is, and the version of the weights.

    version: as answers name it. goes_on: the engine ran before the update.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self.version, self.goes_on = loaded, FIRST, False
        self._number = 0
        self._under_way = self._written = False
        self._met: MeetTrainer | None = None
        self._due = 0.0  # when an update is over that is not continued
        self._spans: dict[str, list[WeightSpan]] = {}  # requests that ran with older weights → what these drew

    @property
    def refusal(self) -> str:
        """The reason why the engine cannot continue now, or nothing."""
        return "its weights are being replaced; POST /finish_weight_update first." if self._under_way else ""

    def check(self, order: Pause) -> None:
        """Raise InvalidConfig if an order cannot be obeyed as things stand."""
        if isinstance(order, BeginWeights) and self._under_way:
            raise InvalidConfig("an update of the weights is under way; finish it before another begins.")
        if isinstance(order, TakeWeights) and not self._under_way:
            raise InvalidConfig("no update of the weights was begun; POST /start_weight_update first.")
        if isinstance(order, EndWeights) and not self._under_way:
            raise InvalidConfig("no update of the weights is under way, so there is none to finish.")
        ours = isinstance(order, MeetTrainer | BeginWeights | TakeWeights | EndWeights)
        if self._loaded.asleep and ours:
            raise InvalidConfig("the engine is asleep; wake it up first.")
        if isinstance(order, MeetTrainer) and self._under_way:
            raise InvalidConfig(self.refusal)
        if type(order) is not Pause and not ours and self._under_way:
            raise InvalidConfig(self.refusal)

    def meet(self, order: MeetTrainer) -> None:
        """Join a trainer's group. Raise InvalidConfig if that cannot be."""
        self._met = None
        self._worker.meet_trainer(Meeting(order.address, order.port, order.rank, order.size, order.limit))
        self._met = order

    def begin(self, *, goes_on: bool) -> None:
        """Begin an update. goes_on: the engine runs otherwise."""
        if self._met is None:
            raise InvalidConfig("no trainer was met; POST /init_weight_transfer_engine first.")
        self._under_way, self._written, self.goes_on = True, False, goes_on
        self._touch()

    def take(self, order: TakeWeights) -> None:
        """Receive tensors. Raise InvalidConfig if none of the update was written yet, and WeightsTorn otherwise."""
        assert self._met is not None
        size = self._met.buffer_bytes if order.buffer_bytes is None else order.buffer_bytes
        try:
            self._worker.take_weights(Announced.of(order.names, order.dtypes, order.shapes, size))
            self._written = True
        except InvalidConfig as error:
            if self._written:
                raise WeightsTorn(f"weights were replaced in part ({error}) and cannot be used.") from error
            raise
        self._touch()

    def end(self, order: EndWeights, running: Iterable[tuple[str, int]]) -> bool:
        """End the update. Return True if there are new weights. running: requests that are here, and their tokens."""
        self._under_way = False
        if not self._written:
            return False
        self._number += 1
        before, self.version = self.version, order.version or str(self._number)
        for name, tokens in running:
            spans = self._spans.setdefault(name, [])
            start = spans[-1].end if spans else 0
            if tokens > start:
                spans.append(WeightSpan(before, start, tokens))
        self._loaded.engine.renew_weights(f"{self.version} {secrets.token_hex(8)}")  # of a name that may come again
        return True

    def forget(self) -> None:
        """Note that the weights are the files' again, since they were loaded anew."""
        self.version, self._met, self._spans = FIRST, None, {}

    def given_up(self) -> bool:
        """Return True if an update is over because nothing came for it in time. Raise WeightsTorn if some of it had
        been written."""
        if not self._under_way or time.monotonic() < self._due:
            return False
        assert self._met is not None
        if self._written:
            raise WeightsTorn(f"an update of weights was not finished within {self._met.limit:g} s.")
        self._under_way = False
        return True

    def ended(self, name: str, stats: RequestStats) -> RequestStats:
        """Return a request's figures with the weights that drew its tokens."""
        spans = self._spans.pop(name, [])
        start = spans[-1].end if spans else 0
        if stats.output_tokens > start or not spans:
            spans.append(WeightSpan(self.version, start, stats.output_tokens))
        return replace(stats, weight_versions=tuple(spans))

    def _touch(self) -> None:
        assert self._met is not None
        self._due = time.monotonic() + self._met.limit

    @property
    def _worker(self) -> TakesWeights:
        worker = self._loaded.worker
        if not isinstance(worker, TakesWeights):
            raise InvalidConfig("ranks with requests of their own do not replace weights; load them from a folder.")
        return worker
