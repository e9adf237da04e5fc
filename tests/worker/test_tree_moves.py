"""What a state of keys and values does behind a verified tree: all that is cached of a token moves with it."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import ContractViolation
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.kernels.base.kv_format import KVFormat
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.tree import Tree
from ridgeline.kernels.ops import Ops
from ridgeline.worker.state.context import ContextKV
from ridgeline.worker.state.paged import PagedKV
from ridgeline.worker.state.states import DeviceRows, States, Verified

FORMATS = (
    KVFormat(),
    KVFormat(dtype="fp8_e4m3", scales="row"),
    KVFormat(dtype="int8", scales="row"),
    KVFormat(dtype="fp8_e5m2", scales="model"),
)
BLOCK, ROWS, COLUMNS = 4, 3, 12


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("width", [6, 16])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_keys_values_and_scales_of_a_path_move_in_every_layer_and_group(
    form: KVFormat, width: int, name: str, device: str
) -> None:
    on = torch.device(device)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=width, scale=1.0, window=window, kv_format=form),
            feed_forward=MLPSpec(intermediate_size=8),
            norm=NormSpec(),
        )
        for window in (None, 9, None, 9, 9)
    )
    model = ModelSpec(
        architecture="", vocab_size=8, hidden_size=8, layers=layers, final_norm=NormSpec(), max_position_embeddings=64
    )
    layout = CacheLayout(groups=model.cache_groups, block_size=BLOCK, dtype="float32", num_pages=200)
    states = States(layout, model, torch.float32, on, Ops(Platform.of(on), {"step_compact": name}))
    octets = states.memory.bytes
    octets.copy_(torch.randint(0, 100, octets.shape, generator=torch.Generator().manual_seed(0)))

    def cells() -> list[torch.Tensor]:
        """The bytes of each token by group, layer, row and position."""
        found = []
        for group, table_SC in zip(states.groups, tables, strict=True):
            assert isinstance(group, PagedKV)
            for (k_NGPD, v_NGPD), scales in zip(group.views, group.scales, strict=True):
                parts = [k_NGPD, v_NGPD] + ([scales.pairs_NGP2] if scales else [])
                blocks = table_SC[slots_R.long()].long()
                each = [
                    part.contiguous().view(torch.uint8)[blocks].transpose(2, 3).reshape(ROWS, COLUMNS * BLOCK, -1)
                    for part in parts
                ]
                found.append(torch.cat(each, -1).cpu())
        return found

    pages = torch.randperm(layout.num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1
    tables = [torch.full((ROWS + 1, COLUMNS), 10**6, dtype=torch.int32, device=on) for _ in layout.groups]
    slots_R = torch.tensor([3, 0, 2], dtype=torch.int32, device=on)
    taken = iter(pages.tolist())
    for index, table_SC in enumerate(tables):
        ids = [layout.block_id(index, next(taken), 0) for _ in range(ROWS * COLUMNS)]
        table_SC[slots_R.long()] = torch.tensor(ids, dtype=torch.int32, device=on).view(ROWS, COLUMNS)
    before, nodes = [5, 14, 30], 10
    paths = [[0, 2, 3, 9, -1], [0, 1, 2, -1, -1], [0, 5, 6, 7, 8]]
    wanted = cells()
    for row, path in enumerate(paths):
        for each in wanted:
            kept = [each[row, before[row] + node].clone() for node in path if node >= 0]
            for k, cell in enumerate(kept):
                each[row, before[row] + k] = cell
    kv_len_R = torch.tensor(before, device=on) + nodes
    verified = Verified(
        slots_R, kv_len_R, torch.ones(ROWS, dtype=torch.bool, device=on),
        torch.full((ROWS,), nodes, dtype=torch.int32, device=on), torch.zeros(ROWS + 1, dtype=torch.int64, device=on),
        5,
    )  # fmt: skip
    chains, moved = octets.clone(), verified._replace(path_RK=torch.tensor(paths, dtype=torch.int32, device=on))
    states.keep(verified, tables)
    assert torch.equal(octets, chains)  # drafts that were chains lie where they must
    states.keep(moved, tables)
    for found, expected in zip(cells(), wanted, strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(octets, chains)


def test_ranks_that_divide_tokens_refuse_trees_in_one_sentence() -> None:
    one, none = torch.ones(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    rows = DeviceRows(
        slots_R=one, start_R1=none, kv_len_R=one, last_R=one, num_tokens=1, tokens_each=1, tree=Tree(one, none[:1])
    )
    group = ContextKV.__new__(ContextKV)  # it refuses before it looks at its memory
    with pytest.raises(ContractViolation, match="draft chains instead"):
        group.begin(rows, one[None], none)
