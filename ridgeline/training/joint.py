"""Medusa-2: heads and the model that they draft for learn together (Cai et al., arXiv 2401.10774, section 3.2).

The model may change a little, so that its last hidden state tells more of the tokens to come. What holds it in place is
its own loss: the divergence from the distributions that it had before, in which it counts most of all passes. Its
learning rate is a quarter of the heads'. The paper lets the heads learn alone at first: begin with heads that
`ridgeline train medusa` made.

Legend:
    B  sequences
    S  tokens per sequence
    C  positions that are scored
    M  model width
    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.training.drafted import BATCH
from ridgeline.training.export import read_model, write_model
from ridgeline.training.heads import MedusaHeads
from ridgeline.training.learners import places, scored
from ridgeline.training.target import Trace
from ridgeline.weights.formats.json_file import read_json

SLOWER = 0.25  # the model's learning rate over the heads'


class JointMedusa:
    """Heads of Medusa and their target, both of which learn. The first pass is the target's own score of the token that
    the first head of frozen heads would guess; each head is a pass further."""

    taps: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads, target: Decoder) -> None:
        self.heads, self.target = heads, target
        self.module = nn.ModuleDict({"heads": heads, "target": target})
        self.parts: Sequence[tuple[nn.Module, float]] = ((heads, 1.0), (target, SLOWER))
        self.most: int | None = len(heads) + 1

    def scores(self, trace: Trace, starts_C: Tensor, passes: int) -> Iterator[Tensor]:
        """Yield the target's scores, then each head's, behind the positions `starts_C` + 1: [B, C, V]."""
        tokens_BS = trace.tokens_BS
        hidden = self.target(tokens_BS.flatten(), places(tokens_BS), DenseCausal(len(tokens_BS)))
        normed_BSM = self.target.normed(hidden).unflatten(0, tokens_BS.shape)
        x_BCM = normed_BSM[:, starts_C + 1]
        yield scored(self.target, x_BCM)
        for head in list(self.heads)[: passes - 1]:
            assert isinstance(head, nn.ModuleList)
            yield scored(self.target, head[0](x_BCM))


def export_target(decoder: Decoder, folder: Path, of: Path, tokenizer: Tokenizer, device: torch.device) -> Decoder:
    """Write the model that has learnt, with the config of the folder `of`, and return it with its rounded weights."""
    write_model(folder, decoder, read_json(of / "config.json", required=True), tokenizer)
    return read_model(folder, device).float().requires_grad_(False)


@torch.inference_mode()
def nats_of(decoder: Decoder, tokens_BS: Tensor) -> float:
    """Return the mean loss of real text, in nats per token."""
    found = []
    for part_BS in tokens_BS.split(BATCH):
        hidden = decoder(part_BS.flatten(), places(part_BS), DenseCausal(len(part_BS)))
        logits_BSV = decoder.logits(hidden).float().unflatten(0, part_BS.shape)
        found.append(F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), part_BS[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(found).mean())
