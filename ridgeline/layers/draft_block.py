"""The network of a head that drafts a block of tokens at once (`core.specs.draft_head.DraftBlockSpec`).

DFlash: Chen et al., arXiv 2602.06036. DSpark adds a Markov head and a confidence head (DeepSpec,
section 3 of its paper).

Legend:
    T  tokens of the step, or places of blocks
    R  rows
    M  model width
    N  taps times the model width
    V  vocabulary, or this rank's part of it
    K  the rank of a Markov head
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.specs.draft_head import DraftBlockSpec, MarkovSpec
from ridgeline.layers.attention import Attention
from ridgeline.layers.build import Build
from ridgeline.layers.decoder import Decoder, Hidden, LayerStates
from ridgeline.layers.draft_head import TargetsHead
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.quantization.scheme import everywhere, scheme


class Markov(nn.Module):
    """A Markov head: it changes the scores of a token by the token before."""

    def __init__(self, spec: MarkovSpec, width: int, vocabulary: int, build: Build) -> None:
        super().__init__()
        self.spec, rank = spec, spec.rank
        self.w1 = Rows(vocabulary, rank, build.within("w1"))
        self.w2 = Linear(rank, (vocabulary,), False, build.within("w2"))
        if spec.kind == "gated":
            self.gate_proj = Linear(width + rank, (rank,), True, build.within("gate_proj"))
        elif spec.kind == "rnn":
            self.joint_proj = Linear(2 * rank + width, (3 * rank,), True, build.within("joint_proj"))

    def begin(self, rows: int) -> Tensor:
        """Return the state in front of a block: [R, K]."""
        return self.w1.weight.new_zeros(rows, self.spec.rank)

    def forward(self, token_R: Tensor, n_RM: Tensor, state_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the addends of the scores behind these tokens, [R, V] of the whole vocabulary, and the next state.

        n_RM: the head's normalized output of the place that is scored.
        """
        row_RK = self.w1.weight[token_R]
        if self.spec.kind == "gated":
            row_RK = row_RK * torch.sigmoid(self.gate_proj(torch.cat((n_RM, row_RK), -1)))
        elif self.spec.kind == "rnn":
            found = self.joint_proj(torch.cat((state_RK, row_RK, n_RM), -1)).chunk(3, -1)
            kept_RK = torch.sigmoid(found[0])
            state_RK, row_RK = kept_RK * state_RK + (1 - kept_RK) * torch.tanh(found[1]), torch.tanh(found[2])
        return self.w2(row_RK), state_RK


class Rows(nn.Module):
    """A table with a row for each token."""

    def __init__(self, rows: int, width: int, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(rows, width)


class DraftBlock(TargetsHead):
    """The head, with the embedding of its target.

    positions, rotary_rows: as in `Decoder`.
    """

    def __init__(
        self, spec: DraftBlockSpec, target: Decoder, *, dtype: torch.dtype, positions: int, rotary_rows: int | None
    ) -> None:
        super().__init__(spec.width, target, dtype, spec.scored, spec.narrow)
        device = next(target.parameters()).device
        build = Build(target.ops, dtype, device, everywhere(scheme(None)), positions, rotary_rows)
        self.spec, width = spec, spec.width
        self.join = Linear(len(spec.taps) * width, (width,), False, build.within("join"))
        self.context_norm = Norm(spec.context_norm, width, build)
        made = (Layer(layer, width, build.within(f"layers.{index}")) for index, layer in enumerate(spec.layers))
        self.layers = nn.ModuleList(made)
        self.final_norm = Norm(spec.final_norm, width, build)
        self.mask_M = build.parameter(width) if spec.own_mask else None
        vocabulary, markov = target.spec.vocab_size, spec.markov
        self.markov = None if markov is None else Markov(markov, width, vocabulary, build.within("markov"))
        self.confidence = None
        if (sure := spec.confidence) is not None:
            read = width + (markov.rank if markov is not None and sure.markov else 0)
            self.confidence = Linear(read, (1,), sure.bias, build.within("confidence"))

    def contexts(self, tapped_TN: Tensor) -> Tensor:
        """Return the contexts of tokens that the target has run: [T, M]. tapped: the outputs of the layers that the
        spec taps, beside each other."""
        return self.context_norm(self.join(tapped_TN))[0]

    def sure_of(self, token_R: Tensor, n_RM: Tensor) -> Tensor:
        """Return the probability that the drafts behind these tokens are right, if all before them are, as the
        checkpoint's confidence head has it: float32 [R]. n_RM: as `Markov.forward` takes it."""
        assert self.confidence is not None
        assert self.spec.confidence is not None
        if self.markov is not None and self.spec.confidence.markov:
            n_RM = torch.cat((n_RM, self.markov.w1.weight[token_R]), -1)
        return self.confidence(n_RM)[:, 0].float().sigmoid()

    def keep(self, context_TM: Tensor, positions_T: Tensor, states: LayerStates) -> None:
        """Write the keys and values of tokens with these contexts."""
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            assert isinstance(mixer, Attention)
            mixer.keep(context_TM, positions_T, states[index])

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, states: LayerStates) -> Tensor:
        """Return the normalized output for the places of blocks: [T, M]."""
        x_TM = self.target.table_rows(token_ids_T)
        if self.spec.embed_scale != 1:
            x_TM = x_TM * self.spec.embed_scale
        if self.mask_M is not None:
            x_TM = torch.where((token_ids_T == self.spec.mask)[:, None], self.mask_M.to(x_TM.dtype), x_TM)
        hidden = Hidden(x_TM, None)
        for index, layer in enumerate(self.layers):
            hidden = Hidden(*layer(*hidden[:2], positions_T, states[index], states.live_T))
        return self.final_norm(*hidden[:2])[0]
