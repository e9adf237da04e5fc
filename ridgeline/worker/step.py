"""A step on its way through the parts of a worker, and what every part may do in it.

Legend:
    R  rows
    U  tokens of this rank's part of the vocabulary; all of them, if there is one rank
    K  tokens that a row may emit, at most
    P  positions that are scored, where rows verify drafts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature, MaskedDrafts, StepPlan, StepResult
from ridgeline.kernels.sampling.scoring import DeviceLogprobs
from ridgeline.layers.decoder import Hidden
from ridgeline.layers.given import GivenPlaces, GivenPositions, GivenRows, GivenVectors
from ridgeline.worker.adapters.tables import AdapterTables
from ridgeline.worker.inputs import DeviceInputs
from ridgeline.worker.share import Stretches, Stripes
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.drafts import Drafts
from ridgeline.worker.speculation.proposer import Taken
from ridgeline.worker.stopwatch import Stopwatch


class HostLengths(NamedTuple):
    """The lengths of a step's rows that the host knows, for ops that size their work on the host. Inside a graph there
    are none. verify_R: the rows that verify drafts, bool."""

    num_tokens_R: np.ndarray
    kv_bound_R: np.ndarray
    verify_R: np.ndarray | None = None


class KeptRows(NamedTuple):
    """All that a step's rows need to advance their slots (`kernels.step.op`), kept while later steps run."""

    slots_R: Tensor
    samples_R: Tensor
    kv_len_R: Tensor
    active_R: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.slots_R)


@dataclass(frozen=True)
class Outcome:
    """The output of the sample segment, in one piece of memory that is posted: token_RK, int32 (-1: none), then
    finish_R, int8 (`Finish` codes), and where rows verify drafts drafted_R, int8. columns: K; 1: none verifies any.
    path_RK: as in `step_verify`, where rows verify trees."""

    packed: Tensor
    num_rows: int
    columns: int
    path_RK: Tensor | None = None

    @staticmethod
    def empty(num_rows: int, device: torch.device, columns: int = 1) -> Outcome:
        size = (4 * columns + 1 + (columns > 1)) * num_rows
        return Outcome(torch.empty(size, dtype=torch.uint8, device=device), num_rows, columns)

    @property
    def token_RK(self) -> Tensor:
        return self.packed[: 4 * self.columns * self.num_rows].view(torch.int32).view(self.num_rows, self.columns)

    @property
    def token_R(self) -> Tensor:
        """The tokens of rows that emit one at most."""
        return self.packed[: 4 * self.num_rows].view(torch.int32)

    @property
    def finish_R(self) -> Tensor:
        return self.packed[4 * self.columns * self.num_rows :][: self.num_rows].view(torch.int8)

    @property
    def drafted_R(self) -> Tensor:
        """The number of drafts that each row verified."""
        return self.packed[-self.num_rows :].view(torch.int8)

    def read(self, octets: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return tokens, finish codes and numbers of drafts of the first rows from a copy of the memory."""
        split = 4 * self.columns * self.num_rows
        token_RK, codes = octets[:split].view(np.int32).reshape(-1, self.columns), octets[split:].view(np.int8)
        drafted_R = codes[self.num_rows :][:rows].astype(np.int32) if self.columns > 1 else None
        return token_RK[:rows], codes[:rows], drafted_R


@dataclass(slots=True)
class DeviceStep:
    """A step as its two segments see it. It names no plan, so a captured graph has one too.

    What the forward segment is given:

    inputs: the rows.
    lengths: None inside a graph.
    given: vectors of tokens that came as such.
    places: the positions of tokens that have three.
    ahead_T: how many tokens behind its own each sees too, int32; None: none.
    drafts: the positions that are scored, where rows verify drafts.
    catching: the time at which a network that drafts runs over the step's tokens; None: that of a step of these shapes
        in a graph.
    share: this rank's part of the tokens, where ranks divide them.
    adapted: some rows may have adapters.

    What it leaves:

    active_R: True for rows that the device has not stopped.
    kv_len_R: tokens cached after the step (1 for stopped rows, so that their attention stays defined).
    last_R: each row's last token.
    hidden: the hidden state of all tokens that were run here, from which prompts are scored, which the next stage
        gets, or which is pooled.
    last: that of the tokens to score, where these are not the last one of every row.
    logits_RU: the scores of every row's last token, or [P, U] where rows verify drafts; none where no tokens are drawn.
    index_P: where rows verify drafts, the index of the token that is drawn at each position.
    taken: what the proposer needs of the step's tokens to draft behind them.

    What the sample segment is given besides:

    kept: the rows, where later steps may have overwritten `inputs`.
    features: those of the rows.
    giver_R: the row whose token each row takes, where some take theirs together (`Rows.guided`).
    wanted: how many drafts the next step may verify of a row; None: as many as this one does.

    outcome is what it leaves.
    """

    inputs: DeviceInputs
    lengths: HostLengths | None = None
    given: GivenVectors | None = None
    places: GivenPositions | None = None
    ahead_T: Tensor | None = None
    drafts: Drafts | None = None
    catching: Catching | None = None
    share: Stripes | Stretches | None = None
    adapted: bool = False
    active_R: Tensor = field(init=False)
    kv_len_R: Tensor = field(init=False)
    last_R: Tensor = field(init=False)
    hidden: Hidden = field(init=False)
    last: Hidden | None = None
    logits_RU: Tensor = field(init=False)
    index_P: Tensor | None = None
    taken: Taken | None = None
    kept: KeptRows | None = None
    features: Feature = Feature.NONE
    giver_R: Tensor | None = None
    wanted: int | None = None
    outcome: Outcome = field(init=False)

    def take(self, other: DeviceStep) -> None:
        """Take what another step's forward segment left for the sample segment."""
        self.active_R, self.kv_len_R, self.logits_RU = other.active_R, other.kv_len_R, other.logits_RU
        self.hidden, self.index_P, self.taken = other.hidden, other.index_P, other.taken

    def keep(self, rows: int) -> KeptRows:
        """Return all that the first rows need to advance, in memory of its own: a graph's next step overwrites the
        graph's."""
        given = self.inputs.slots_R, self.inputs.samples_R, self.kv_len_R, self.active_R
        return KeptRows(*(tensor[:rows].clone() for tensor in given))


class Captured(Protocol):
    """The two segments of a step, captured."""

    def forward(self, step: DeviceStep) -> None:
        """Replay the forward segment."""

    def sample(self, step: DeviceStep) -> bool:
        """Replay the sample segment. Return False if it was not captured with the step's features."""


class Letter(NamedTuple):
    """An outcome that is on its way to the host (`worker/mailbox.py`)."""

    turn: int
    num_bytes: int


class Arriving(Protocol):
    """The outcome of a step, on its way to the host."""

    def result(self, watch: Stopwatch) -> StepResult:
        """Wait for the outcome and return it. Raises whatever error the device reports."""


@dataclass(slots=True)
class PlannedStep:
    """A plan on its way through the parts. Rows of tensors beyond the plan's are padding.

    plan: with the tokens that run: a part may cut it.
    given_drafts: by row, those of rows with masks. masks: by row, as `Worker.provide_masks` gets them.
    given, places, ahead_T: as in `DeviceStep`.
    pictured: by row, the embeddings of pictures, where a tower makes these: [M].
    verifies: rows verify drafts. wanted: how many of a row the next step may verify.
    ran: how many tokens run, where that is not what was planned.
    graph: the graph that is replayed; None: the segments run op by op.
    reported_RU: the scores from which log-probabilities are taken.
    prompt_logprobs, logprobs, apart: by row of the plan, what was found of these; the last ones have no place beside
        those of other rows.
    watched: a part watches the layers, so no graph is replayed. aligned: by row, what it saw (`worker/alignment.py`).
    letter: the outcome's, if tokens were drawn.
    arriving: what else comes of the step.
    """

    plan: StepPlan
    given_drafts: Mapping[int, MaskedDrafts]
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    given: GivenRows | None = None
    places: GivenPlaces | None = None
    ahead_T: Tensor | None = None
    pictured: Mapping[int, Tensor] = field(default_factory=dict)
    verifies: bool = False
    wanted: int = 0
    ran: int | None = None
    device: DeviceStep = field(init=False)
    graph: Captured | None = None
    prompt_logprobs: dict[int, DeviceLogprobs] = field(default_factory=dict)
    reported_RU: Tensor | None = None
    logprobs: DeviceLogprobs | None = None
    apart: dict[int, DeviceLogprobs] = field(default_factory=dict)
    watched: bool = False
    aligned: dict[int, Tensor] = field(default_factory=dict)
    letter: Letter | None = None
    arriving: Arriving | None = None

    def keep(self) -> None:
        """Put what the sample segment needs into memory of its own, which a step in the same graph does not
        overwrite."""
        device, rows = self.device, len(self.plan.rows)
        device.kept, self.graph = device.keep(rows), None
        device.active_R, device.kv_len_R = device.kept.active_R, device.kept.kv_len_R
        device.logits_RU = device.logits_RU[:rows].clone()


class StepPart:
    """One part of a step. A worker chooses its parts once, from the model and the settings, and brings every step
    through them in their order, one moment after the other:

        prepare         on the host, before anything of the step is launched
        forward         the forward segment
        after_forward   on the host
        before_sample   on the host, once masks have come
        sample          the sample segment
        after_sample    on the host

    The segments read and write device memory only and never look at a value, so each of them can be captured as a
    graph. A part does nothing at the moments that it does not define.

    features: those of which a step's rows need one, for the part to have a moment on the host; NONE: every step has it.
    """

    features = Feature.NONE

    def prepare(self, step: PlannedStep) -> None: ...
    def forward(self, step: DeviceStep) -> None: ...
    def after_forward(self, step: PlannedStep) -> None: ...
    def before_sample(self, step: PlannedStep) -> None: ...
    def sample(self, step: DeviceStep) -> None: ...
    def after_sample(self, step: PlannedStep) -> None: ...


class Ending(StepPart):
    """The part that says what becomes of the network's output. draws: tokens are drawn from it. adapters: those that
    rows may have."""

    draws = False
    adapters: AdapterTables | None = None

    def expected(self, step: PlannedStep) -> Arriving:
        """Return the outcome of a step whose work is queued."""
        raise NotImplementedError


Act = Callable[[Any], None]


def moment(parts: Sequence[StepPart], name: str) -> list[tuple[int, Act]]:
    """Return the parts' methods for a moment, each with the features of which its part needs one. They are plain
    numbers, whose comparison costs a tenth of that of flags."""
    own = [part for part in parts if getattr(type(part), name) is not getattr(StepPart, name)]
    return [(int(part.features), getattr(part, name)) for part in own]
