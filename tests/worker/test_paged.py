"""Blocks copied on the device, against what every layer sees of its memory; what lies in it beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.core.plan.step import CopyBlocks
from ridgeline.core.specs.cache_layout import CacheGroup, CacheLayout
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.core.specs.state import KVSpec
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.heads import Heads
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.states import DeviceRows, States
from tests.driving import ask, rig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_are_copied_in_all_layers_of_their_group_and_nothing_else_changes(
    device: str, dtype: torch.dtype
) -> None:
    specs = [KVSpec(num_kv_heads=2, head_dim=8, window=window) for window in (None, 5)]
    groups = tuple(
        CacheGroup(spec=spec, layers=layers) for spec, layers in zip(specs, [(1, 3), (0, 2, 4)], strict=True)
    )
    layout = CacheLayout(groups=groups, block_size=4, dtype=str(dtype).removeprefix("torch."), num_pages=6)
    memory = StateMemory(layout, torch.device(device))

    def views() -> dict[int, Tensor]:
        """Layer → its units."""
        return {
            layer: memory.view(g, index, dtype, (2, 2, 4, 8))
            for g, group in enumerate(groups)
            for index, layer in enumerate(group.layers)
        }

    memory.bytes.view(dtype).normal_()
    # Pages 1 and 2 are the first group's, 3 to 5 the second's; each page has blocks of its own
    first = [layout.block_id(0, page, index) for page in (1, 2) for index in range(3)]
    second = [layout.block_id(1, page, index) for page in (3, 4, 5) for index in range(2)]
    copies = [
        CopyBlocks(0, (first[0], first[0], first[4]), (first[1], first[3], first[5])),
        CopyBlocks(1, (second[5], second[2]), (second[0], second[3])),
    ]
    before = {layer: tensor.clone() for layer, tensor in views().items()}
    memory.copy(copies)
    for (group, sources, targets), others in zip(copies, (first, second), strict=True):
        came_from = dict(zip(others, others, strict=True)) | dict(zip(targets, sources, strict=True))
        for layer in layout.groups[group].layers:
            for block, source in came_from.items():
                assert torch.equal(views()[layer][block], before[layer][source])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "family", ["mistral", "gemma2", "bloom", "gpt_oss", "gemma4_moe"]
)  # windows, soft caps, slopes, sinks, unlike groups
def test_no_logit_depends_on_what_lay_in_the_cache(tiny_model: Callable[[str], Path], family: str, device: str) -> None:
    """Every cell is NaN beforehand, the null block's too; rows of unequal lengths, stopped ones among them."""
    seen = []
    for value in (0.0, torch.nan):
        with rig(tiny_model(family), device=device, kv_cache_memory=1 << 24) as own:
            parameter = next(own.runner.decoder.parameters())
            own.runner.segments.states.memory.bytes.view(parameter.dtype).fill_(value)
            prompts = [tuple(3 + (7 * i + n) % 90 for i in range(n)) for n in (37, 3, 9, 21)]
            requests = [ask(f"r{n}", p, max_tokens=4 + 3 * n, logprobs=1) for n, p in enumerate(prompts)]
            own.run(*requests)
            assert not own.errors
            seen.append({name: outcome.scored for name, outcome in own.outcomes.items()})
    assert all(seen[0].values())
    assert seen[1] == seen[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_that_remember_alike_may_attend_otherwise(device: str) -> None:
    """Layers of one group with other numbers of heads and a soft cap, over rows that share their first blocks."""
    mixers = [
        AttentionSpec(num_heads=heads, num_kv_heads=1, head_dim=16, scale=0.3, softcap=cap)
        for heads, cap in ((1, None), (16, 5.0))
    ]
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=MLPSpec(intermediate_size=8), norm=NormSpec()) for mixer in mixers
    )
    model = ModelSpec(
        architecture="", vocab_size=8, hidden_size=64, layers=layers, final_norm=NormSpec(), max_position_embeddings=512
    )
    rows, columns, shared, on = 2, 6, 4, torch.device(device)
    layout = CacheLayout(groups=model.cache_groups, block_size=16, dtype="float32", num_pages=1 + rows * columns)
    assert len(layout.groups) == 1
    table_SC = 1 + torch.arange(rows * columns, dtype=torch.int32, device=on).view(rows, columns)
    table_SC[1:, :shared] = table_SC[0, :shared]
    kv_len_R = torch.tensor([70, 81], device=on)
    prefix_4R = torch.tensor([[*range(rows)], [0] * rows, [rows] * rows, [16 * shared] * rows], dtype=torch.int32)
    step = DeviceRows(
        slots_R=torch.arange(rows, dtype=torch.int32, device=on),
        start_R1=torch.arange(rows + 1, dtype=torch.int32, device=on),
        kv_len_R=kv_len_R,
        last_R=torch.arange(rows, device=on),
        num_tokens=rows,
        tokens_each=1,
        prefix_4R=prefix_4R.to(on),
    )
    place_T = table_SC[torch.arange(rows), (kv_len_R - 1) // 16] * 16 + (kv_len_R - 1) % 16

    def attended(implementation: str) -> list[Tensor]:
        names = ("attention_schedule", "paged_attention", "decode_attention", "rope_kv")
        ops = Ops(Platform.of(on), dict.fromkeys(names, implementation))
        states, generator = States(layout, model, torch.float32, on, ops), torch.Generator(on).manual_seed(0)
        states.memory.bytes.view(torch.float32).normal_(generator=generator)
        states.begin(step, [table_SC], [place_T])
        return [
            states[index].attend(
                torch.randn(rows, (mixer.num_heads + 2) * 16, generator=generator, device=on),
                kv_len_R - 1,
                Heads(mixer, ops, None, None, 0.0, None, Softmax(mixer.scale, mixer.softcap)),
            )
            for index, mixer in enumerate(mixers)
        ]

    for found, expected in zip(attended("triton"), attended("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
