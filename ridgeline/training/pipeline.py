"""A pipeline that trains. Each stage runs its layers forward and backward, one part of the batch after the other.

    gpipe   all forward passes, then all backward passes (Huang et al., arXiv 1811.06965)
    1f1b    one forward and one backward pass in turn, after as many forward passes as stages follow (Narayanan et al.,
            arXiv 2006.09503, section 3.2, "PipeDream-Flush")

With m parts on p stages, both leave a stage idle for (p - 1) / (m + p - 1) of the time. They differ in the activations
that wait for their backward pass: those of m parts, or of at most p - stage.

Legend:
    B  sequences of a batch
    R  sequences of a part
    S  tokens per sequence
    T  tokens of a part, R * S
    M  numbers per token that stages hand on
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.stages import of_stage
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.lines import connect
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.pipe import WHOLE, Pipe
from ridgeline.parallel.processes import ProcessAxis
from ridgeline.training.objective import NextTokenLoss, training_decoder
from ridgeline.training.optimizer import initialize

FORWARD, BACKWARD = "forward", "backward"


def gpipe(stage: int, stages: int, parts: int) -> list[str]:
    """Return the order of a stage's passes."""
    return [FORWARD] * parts + [BACKWARD] * parts


def one_forward_one_backward(stage: int, stages: int, parts: int) -> list[str]:
    """Return the order of a stage's passes."""
    ahead = min(stages - 1 - stage, parts)
    return [FORWARD] * ahead + [FORWARD, BACKWARD] * (parts - ahead) + [BACKWARD] * ahead


SCHEDULES: dict[str, Callable[[int, int, int], list[str]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


class Stages(NamedTuple):
    """The stages of a pipeline, as one of them sees them.

    ahead: carries hidden states to the next stage. back: carries gradients to the stage before.
    group: all stages. ends: the first and the last; any other stage is alone there.
    """

    ahead: Pipe = WHOLE
    back: Pipe = WHOLE
    group: Axis = ALONE
    ends: Axis = ALONE


def stages_of(everybody: ProcessAxis, limit: float) -> Stages:
    """Return the stages, one for each process. Every process calls it once. limit: the timeout of a message, in
    seconds."""
    order = range(everybody.size)
    ahead, back = (connect(everybody, [each], limit) for each in (order, order[::-1]))
    ends = [[order[0], order[-1]], *([stage] for stage in order[1:-1])]
    return Stages(ahead, back, everybody, everybody.divided(ProcessAxis, ends, limit))


def stage_decoder(spec: ModelSpec, stages: Stages, seed: int, device: torch.device) -> Decoder:
    """Return a stage's part of a model, in float32, with the initial weights that the whole model would have. These are
    made on this process first."""
    whole, mesh = training_decoder(spec, torch.float32, torch.device("cpu")), Mesh(pp=stages.ahead)
    initialize(whole, len(spec.layers), seed)
    own = training_decoder(spec, torch.float32, device, mesh)
    own.load_state_dict(of_stage(whole.state_dict(), own.spec))
    return own


class Waiting(NamedTuple):
    """A part between its passes: its input, or None at the first stage, and its output."""

    before_TM: Tensor | None
    out: Tensor


class Pipeline:
    """The loss of batches over the stages of a pipeline, and its gradients.

    rows: sequences of a batch, in so many equal parts. chunk, autocast: see NextTokenLoss.

    most_waiting: the most parts that waited for their backward pass at once, as this stage ran them.
    """

    def __init__(
        self,
        decoder: Decoder,
        stages: Stages,
        *,
        schedule: str,
        parts: int,
        rows: int,
        chunk: int,
        autocast: torch.dtype | None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise InvalidConfig(f"unknown schedule {schedule!r} of a pipeline; known: {', '.join(SCHEDULES)}.")
        if parts < 1 or rows % parts:
            raise InvalidConfig(f"a batch of {rows} sequences has no {parts} equal parts; choose a divisor.")
        if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in decoder.whole.layers):
            raise InvalidConfig("experts are balanced over whole batches; train a mixture without a pipeline.")
        pipe = stages.ahead
        self.decoder, self.parts, self._stages, self.most_waiting = decoder, parts, stages, 0
        self._first, self._last = pipe.rank == 0, pipe.rank == pipe.size - 1
        self._passes = SCHEDULES[schedule](pipe.rank, pipe.size, parts)
        self._loss = NextTokenLoss(decoder, batch_size=rows // parts, chunk=chunk, autocast=autocast)
        self._tied = decoder.whole.tie_word_embeddings and pipe.size > 1

    def backward(self, tokens_BS1: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Run all passes of a batch. Return its mean loss, on every stage.

        Afterwards this stage's parameters, which had no gradients before, have those of the scaled loss. All stages
        call it with the same tokens.
        """
        ahead, waiting, coming = self._stages.ahead, deque[Waiting](), iter(tokens_BS1.chunk(self.parts))
        total_1 = torch.zeros(1, device=tokens_BS1.device)
        for each in self._passes:
            if each == FORWARD:
                waiting.append(self._forward(next(coming)))
                self.most_waiting = max(self.most_waiting, len(waiting))
                total_1 += waiting[-1].out.detach() if self._last else 0
            else:
                self._backward(waiting.popleft(), scaled)
        if not self._last:
            ahead.hear(total_1)()
        elif not self._first:
            ahead.tell(total_1)
        if self._tied and (self._first or self._last):
            table = self._shared()
            assert table.grad is not None
            table.grad = self._stages.ends.all_reduce(table.grad)
        return total_1[0]

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of all stages' gradients. A table that two stages share counts once."""
        copy = self._shared() if self._tied and self._last else None
        own = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and p is not copy])
        return self._stages.group.all_reduce(own.square().reshape(1)).sqrt()[0]

    def _forward(self, tokens_RS1: Tensor) -> Waiting:
        before_TM = None
        if not self._first:
            length = tokens_RS1[:, :-1].numel()
            before_TM = torch.empty(length, self.decoder.spec.handed_width, device=tokens_RS1.device)
            self._stages.ahead.receive(before_TM)
            before_TM.requires_grad_()
        out = self.run(tokens_RS1, before_TM)
        if not self._last:
            self._stages.ahead.send(out.detach())
        return Waiting(before_TM, out)

    def _backward(self, part: Waiting, scaled: Callable[[Tensor], Tensor]) -> None:
        if self._last:
            self.derive(scaled(part.out), None)
        else:
            gradient_TM = torch.empty_like(part.out)
            self._stages.back.receive(gradient_TM)
            self.derive(part.out, gradient_TM)
        if part.before_TM is not None:
            assert part.before_TM.grad is not None
            self._stages.back.send(part.before_TM.grad)

    def run(self, tokens_RS1: Tensor, before_TM: Tensor | None) -> Tensor:
        """Return the output of a part: the input of the next stage, or at the last one the part's share of the loss."""
        hidden = self._loss.hidden(tokens_RS1, before_TM)
        if self._last:
            return self._loss.mean(hidden, tokens_RS1) / self.parts
        return self.decoder.handed_on(hidden).to(self.decoder.dtype)

    def derive(self, out: Tensor, gradient_TM: Tensor | None) -> None:
        """Add a part's gradients to those of this stage's parameters, and let go of its activations."""
        out.backward(gradient_TM)

    def _shared(self) -> nn.Parameter:
        """Return this end's copy of the table with which tokens are embedded and scored."""
        table = self.decoder.embed.weight if self._first else self.decoder.unembed.weight
        assert isinstance(table, nn.Parameter)
        return table
