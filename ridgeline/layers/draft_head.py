"""The network of a head that drafts from hidden states (`core.specs.draft_head.DraftHeadSpec`).

EAGLE: Li et al., arXiv 2401.15077. EAGLE-3: arXiv 2503.01840. Multi-token prediction: DeepSeek-V3, arXiv 2412.19437.

Legend:
    T  tokens of the step, or those of them that are scored
    M  model width
    N  numbers that are read of a token: taps times the model width, or the width
    V  vocabulary
    U  tokens that the head scores
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.core.specs.draft_head import DraftHeadSpec
from ridgeline.core.specs.model import LayerSpec, NormSpec
from ridgeline.layers import kinds
from ridgeline.layers.attention import Attends, Attention
from ridgeline.layers.build import Build
from ridgeline.layers.decoder import Decoder, Hidden, LayerStates
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.quantization.scheme import everywhere, scheme


class MeetingLayer(nn.Module):
    """A layer whose attention reads the embedding and the feature beside each other."""

    def __init__(self, spec: LayerSpec, norm: NormSpec, normed_residual: bool, width: int, build: Build) -> None:
        super().__init__()
        self._normed_residual = normed_residual
        self.embed_norm, self.feature_norm = Norm(norm, width, build), Norm(norm, width, build)
        self.mixer = Attention(spec.attention, width, build.within("mixer"), inputs=2 * width)
        self.feed_forward_norm = Norm(spec.norm, width, build)
        self.feed_forward = kinds.feed_forward(spec.feed_forward, width, build.within("feed_forward"))

    def forward(
        self, embed_TM: Tensor, feature_TM: Tensor, positions_T: Tensor, state: Attends, live_T: Tensor | None
    ) -> Hidden:
        """Return the layer's output, not yet added to its residual."""
        normed_TM = self.feature_norm(feature_TM)[0]
        qkv_TX = self.mixer.qkv(torch.cat((self.embed_norm(embed_TM)[0], normed_TM), dim=-1))
        x_TM = self.mixer.mixed(qkv_TX, positions_T, state)
        residual_TM = normed_TM if self._normed_residual else feature_TM
        return Hidden(*self.feed_forward(self.feed_forward_norm, x_TM, residual_TM, live_T))


class TargetsHead(nn.Module):
    """The part of a head that depends on its target: the output matrix, which is the target's unless the head has its
    own. The parameters are uninitialised.

    scored, narrow: as in `DraftHeadSpec`.
    """

    tokens_U: Tensor | None

    def __init__(self, width: int, target: Decoder, dtype: torch.dtype, scored: int, narrow: bool) -> None:
        super().__init__()
        self.dtype = dtype  # of activations, which some parameters have not
        self._target = (target,)  # in a tuple, so that its parameters are not this module's
        device = next(target.parameters()).device
        build = Build(target.ops, dtype, device, everywhere(scheme(None)))
        self.unembed = Linear(width, (scored,), False, build.within("unembed")) if scored else None
        tokens_U = torch.arange(scored, device=device) if narrow else None
        self.register_buffer("tokens_U", tokens_U, persistent=False)

    @property
    def target(self) -> Decoder:
        return self._target[0]

    @property
    def tp(self) -> Axis:
        """The ranks that divide the vocabulary that is scored. All of them have the rest of the head."""
        return self.target.tp if self.unembed is None else ALONE

    def prepare(self) -> None:
        """Make the loaded weights ready to multiply."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, (Linear, ExpertStack, Experts)):
                module.prepare()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, without the target's."""
        prepared = (module.prepared_bytes for module in self.modules() if isinstance(module, (Linear, ExpertStack)))
        return sum(p.nbytes for p in self.parameters()) + sum(prepared)

    def scores(self, n_TM: Tensor) -> Tensor:
        """Return the scores of vectors that are behind a norm: [T, V], or this rank's part of them."""
        if self.unembed is None:
            return self.target.scored(n_TM)
        logits_TU: Any = self.unembed(n_TM)
        if self.tokens_U is None:
            return logits_TU
        logits_TV = logits_TU.new_full((len(logits_TU), self.target.spec.vocab_size), float("-inf"))
        return logits_TV.index_copy_(1, self.tokens_U, logits_TU)


class DraftHead(TargetsHead):
    """The head, with the embedding of its target.

    positions, rotary_rows: as in `Decoder`.
    """

    def __init__(
        self, spec: DraftHeadSpec, target: Decoder, *, dtype: torch.dtype, positions: int, rotary_rows: int | None
    ) -> None:
        super().__init__(spec.width, target, dtype, spec.scored, spec.narrow)
        device = next(target.parameters()).device
        build = Build(target.ops, dtype, device, everywhere(scheme(None)), positions, rotary_rows)
        width = spec.width
        self.spec = spec
        self.join = Linear(len(spec.taps) * width, (width,), False, build.within("join")) if spec.taps else None
        layers = spec.layers
        if spec.joined == "product":
            entry = spec.entry_norm
            self.embed_norm = None if entry is None else Norm(entry, width, build)
            self.feature_norm = None if entry is None else Norm(entry, width, build)
            self.entry = Linear(2 * width, (width,), spec.entry_bias, build.within("entry"))
        else:
            assert spec.entry_norm is not None
            first = build.within("meeting")
            self.meeting = MeetingLayer(layers[0], spec.entry_norm, spec.normed_residual, width, first)
            layers = layers[1:]
        made = (Layer(layer, width, build.within(f"layers.{index}")) for index, layer in enumerate(layers))
        self.layers = nn.ModuleList(made)
        self.final_norm = None if spec.final_norm is None else Norm(spec.final_norm, width, build)

    @property
    def read_width(self) -> int:
        """The numbers of a token that `features` takes."""
        return max(1, len(self.spec.taps)) * self.spec.width

    def read(self, hidden: Hidden, tapped: Sequence[Tensor]) -> Tensor:
        """Return the numbers of tokens that the target has run, of which `features` makes their features: [T, N].
        tapped: the outputs of the layers that the spec taps."""
        return self.target.normed(hidden) if self.join is None else torch.cat(list(tapped), dim=-1)

    def features(self, read_TN: Tensor) -> Tensor:
        """Return the features of tokens, from what was read of them: [T, M]."""
        return read_TN if self.join is None else self.join(read_TN)

    def forward(self, token_ids_T: Tensor, feature_TM: Tensor, positions_T: Tensor, states: LayerStates) -> Hidden:
        """Return the layers' output for pairs of a feature and the token behind it. The states are those of the head's
        own layers."""
        embed_TM = self.target.table_rows(token_ids_T)
        if self.spec.joined == "attention":
            hidden, done = self.meeting(embed_TM, feature_TM, positions_T, states[0], states.live_T), 1
        else:
            if self.embed_norm is not None and self.feature_norm is not None:
                embed_TM, feature_TM = self.embed_norm(embed_TM)[0], self.feature_norm(feature_TM)[0]
            hidden, done = Hidden(self.entry(torch.cat((embed_TM, feature_TM), dim=-1)), None), 0
        for index, layer in enumerate(self.layers, start=done):
            hidden = Hidden(*layer(*hidden[:2], positions_T, states[index], states.live_T))
        return hidden

    def found(self, hidden: Hidden) -> tuple[Tensor, Tensor]:
        """Return the scores behind tokens, [T, V] or this rank's part of them, and what takes the place of the feature
        of the next: [T, M]."""
        x_TM, residual_TM, _ = hidden
        s_TM = x_TM if residual_TM is None else x_TM + residual_TM
        n_TM = s_TM if self.final_norm is None else self.final_norm(s_TM)[0]
        return self.scores(n_TM), n_TM if self.spec.carries_norm else s_TM
