"""Attention within a window over whole sequences is that of a mask over all tokens, with gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.core.specs.model import AttentionSpec
from ridgeline.layers import dense
from ridgeline.models import model_config
from ridgeline.training.embedded import llama_config
from ridgeline.training.objective import training_decoder
from ridgeline.training.optimizer import initialize

WINDOW = 8


def masked(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute softmax over all tokens, of which those outside of the window have no weight."""
    k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for x in (k, v))
    scores = spec.scale * q @ k.mT
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return scores.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("length", [2 * WINDOW, 5 * WINDOW])
def test_blocks_of_a_window_are_the_mask(length: int) -> None:
    spec = model_config(llama_config(hidden=64, intermediate=64, layers=1, heads=4, kv_heads=2)).spec.layers[0].mixer
    assert isinstance(spec, AttentionSpec)
    spec, generator = replace(spec, window=WINDOW), torch.Generator().manual_seed(0)
    given = [torch.randn(3, heads, length, 64, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    found = []
    for attend in (dense._in_blocks, masked):
        out = attend(*given, spec)  # type: ignore[operator]
        found.append((out, *torch.autograd.grad(out.square().sum(), given)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_model_reads_blocks_and_other_lengths_alike() -> None:
    """Windows that do not divide the length run through the mask: the tokens that both have get the same outputs."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
    config = llama_config(hidden=64, intermediate=64, layers=2, heads=1, kv_heads=1) | mistral
    decoder = training_decoder(model_config(config).spec, torch.float32, torch.device("cpu"))
    initialize(decoder, 2, seed=0)
    tokens = torch.randint(0, 4096, (4 * WINDOW,), generator=torch.Generator().manual_seed(0))
    outputs = []
    for length in (4 * WINDOW, 4 * WINDOW - 3):
        states = dense.dense_states(decoder.spec, 1, length, torch.float32, torch.device("cpu"))
        outputs.append(decoder.logits(decoder(tokens[:length], torch.arange(length), states))[: 4 * WINDOW - 3])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
