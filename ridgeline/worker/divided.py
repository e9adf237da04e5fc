"""The network of ranks that divide a context: in a step that is worth it each runs its share of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.op import StepInputs
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts
from ridgeline.layers.given import GivenRows
from ridgeline.worker.network import ModelNetwork
from ridgeline.worker.share import Stretches, Stripes
from ridgeline.worker.slots import Slots
from ridgeline.worker.state.states import States
from ridgeline.worker.step import DeviceStep, PlannedStep


class DividedNetwork(ModelNetwork):
    """divide_from: the tokens of a step from which on the ranks divide them.

    some: the context in which the layers run on some of the step's tokens.
    """

    def __init__(self, decoder: Decoder, ops: Ops, slots: Slots, states: States, divide_from: int) -> None:
        super().__init__(decoder, ops, slots, states)
        self._ring, self._divide_from = decoder.mesh.cp, divide_from
        self._recurs = any(group.spec.exact for group in states.memory.layout.groups)
        sees = any(decoder.spec.media_widths)
        self._turns_recurrent = self._recurs and self.axes is not None and sees
        self.some: Callable[[Tensor], AbstractContextManager[None]] = lambda _: nullcontext()
        self._tallies = [module.tally_E for module in decoder.modules() if isinstance(module, Experts)]

    def prepare(self, step: PlannedStep) -> None:
        """Find this rank's share of the step's tokens. All of them must be here if prompts are scored, and where layers
        that exchange their tokens rotate by several axes."""
        whole = bool(step.plan.rows.features & Feature.PROMPT_LOGPROBS) or self._turns_recurrent
        if step.graph is None and not whole:
            step.device.share = self._share(step)

    def _share(self, step: PlannedStep) -> Stripes | Stretches | None:
        rows = step.plan.rows
        if int(rows.num_tokens_R.sum()) < self._divide_from:
            return None
        stripes = Stripes(self._ring, rows.num_tokens_R, step.plan.kv_bound_R, step.device.inputs.slots_R.device)
        if not stripes.count_N.all():
            return None
        return Stretches(self._ring, stripes, rows.marks_R) if self._recurs else stripes

    def run(self, step: DeviceStep, found: StepInputs) -> None:
        if (share := step.share) is None:
            super().run(step, found)
            return
        mine_t = share.mine_t
        self.states.live_T = found.live_T[mine_t]
        given = step.given
        if given is not None:
            assert isinstance(given, GivenRows)  # no graph has a share
            given = given.among(mine_t, len(found.token_ids_T))
        positions_T = found.positions_T
        turned = nullcontext(positions_T) if self.axes is None else self.axes.turned(step, positions_T)
        with share.counting(self._tallies), self.some(mine_t), turned as positions_T:
            step.hidden = self.decoder(found.token_ids_T[mine_t], positions_T[mine_t], self.states, None, given)
        step.last = share.last(step.hidden, step.inputs.num_rows)
