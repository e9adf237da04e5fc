"""The memory of a step's intermediate tensors, from shapes: an upper estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.registry import Registry
from ridgeline.core.settings.speculation import MOST_WAITING
from ridgeline.core.specs.model import AttentionSpec, ModelSpec
from ridgeline.kernels.attention.paged.cost import WORKSPACE_BYTES, pieces_bytes
from ridgeline.perf.footprint import step_bytes_per_token

LOGIT_COPIES = 3  # float32, of each position that is scored
TABLE_BYTES = 5  # of each entry of the vocabulary in the tables that sampling keeps of a request

# What a kind of mixer takes beside its inputs and outputs while it runs, if that may be more than WORKSPACE_BYTES. Each
# is called with (spec, the tokens of a pass, sizes).
WORKSPACES = Registry("mixer with a workspace", {"latent_attention": "ridgeline.perf.latent:workspace"})


@dataclass(frozen=True)
class Activations:
    """The tensors of every token, the logits of every position that is scored, the tables of sampling, and the
    workspace of one mixer. A stage of a pipeline holds hidden states besides: those that come, and those of two steps
    that go.

    least: tokens that a pass may run over, however few a step has.
    """

    model: ModelSpec
    least: int = 0

    def reserve(self, sizes: StepSizes) -> Reserved:
        model, tokens = self.model, max(sizes.max_tokens, self.least)
        entries = 0 if model.pooling is not None and not model.pooling.tokens else model.vocab_size
        tables = sizes.max_seqs * (entries if model.pooling is None else 1) * TABLE_BYTES
        per_token = int(step_bytes_per_token(model, sizes.itemsize))
        if model.stage is not None:
            per_token += 3 * model.handed_width * sizes.itemsize
        mixers = {layer.mixer for layer in model.layers if layer.mixer.kind in WORKSPACES}
        workspace = max(WORKSPACE_BYTES, *(WORKSPACES[mixer.kind](mixer, tokens, sizes) for mixer in mixers), 0)
        if sizes.on_gpu:  # beside the keys and values of long rows, which take all of WORKSPACE_BYTES
            workspace += max((pieces_bytes(each.head_dim) for each in _quantized(model)), default=0)
        logits = sizes.max_scored * entries * 4 * LOGIT_COPIES
        return Reserved(passing=tokens * per_token + logits + tables + workspace)


def _quantized(model: ModelSpec) -> Iterator[AttentionSpec]:
    """Yield the layers of attention that cache levels of 8 bits, which Hopper's kernel widens for long rows."""
    for layer in model.layers:
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_format.quantized:
            yield layer.mixer


@dataclass(frozen=True)
class DraftActivations:
    """The activations of a draft network. It may run over the tokens of many steps at once; until then these wait with
    what was read of each.

    reads: how many hidden states that is.
    """

    model: ModelSpec
    reads: int = 1

    def reserve(self, sizes: StepSizes) -> Reserved:
        passing = Activations(self.model, max(sizes.max_drafted, MOST_WAITING)).reserve(sizes).passing
        waiting = (MOST_WAITING + sizes.max_seqs) * (4 + self.reads * self.model.hidden_size * sizes.itemsize)
        return Reserved(waiting, passing)
