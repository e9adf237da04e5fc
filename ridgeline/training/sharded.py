"""A decoder whose weights, gradients and optimizer state are divided over processes: ZeRO's stage 3 (Rajbhandari et
al., arXiv 1910.02054), by torch's FSDP2 (Zhao et al., arXiv 2304.11277).

Each layer is a group: its weights are gathered in front of its forward pass and again in front of its backward pass,
and its gradients are reduced and divided behind that. What no layer has is one more group, whole from the forward to
the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.quantization.weight import weight_of
from ridgeline.training.conversations import Example
from ridgeline.training.tuned import PackRunner


@dataclass(frozen=True)
class LossPack:
    """The examples of a pass, as one thing: FSDP looks at every number of a list that it is given."""

    examples: Sequence[Example]


class PackLoss(nn.Module):
    """The nats per counted token of a process' packed examples, as a module that FSDP can wrap. chunk: the positions
    whose logits exist at once."""

    def __init__(self, decoder: Decoder, chunk: int) -> None:
        super().__init__()
        self.decoder = decoder
        self._runs = PackRunner(decoder, autocast=None, chunk=chunk)

    def forward(self, pack: LossPack) -> Tensor:
        return self._runs.nats(pack.examples) / sum(sum(each.counted) for each in pack.examples)


def sharded_loss(decoder: Decoder, chunk: int, dtype: torch.dtype) -> PackLoss:
    """Return the loss of a decoder, whose parameters are then divided over all processes of the default group.

    dtype: of the gathered weights, and so of all products; the divided ones, and sums of gradients, stay float32.
    Gradients are means over the processes.
    """
    loss = PackLoss(decoder, chunk)
    device = next(decoder.parameters()).device
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for group in (*decoder.layers, loss):
        fully_shard(group, mesh=mesh, mp_policy=policy)
        of_layers = {id(each) for layer in decoder.layers for each in layer.modules()} if group is loss else set()
        own = [each for each in group.modules() if isinstance(each, Linear) and id(each) not in of_layers]
        group.register_forward_pre_hook(partial(_take, own))  # behind FSDP's own, which gathers the weights
        _take(own)
    return loss


def _take(linears: Sequence[Linear], *_: object) -> None:
    """Let linear maps multiply with the weights that are there now: whole ones during a pass."""
    for each in linears:
        assert each.weight is not None
        each.multiply_with(weight_of(each.ops, each.weight))
