"""Prefill attention for Hopper: its list of work, its machine code, and on a GPU its results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import RaggedBatch, paged_attention_reference
from ridgeline.kernels.base.op import Platform
from tests.kernels.unseen import forgotten, spoiled

pytest.importorskip("triton")
from ridgeline.kernels.attention.paged import hopper, hopper_items
from ridgeline.kernels.attention.paged.hopper_kernel import prefill_kernel

CASES = (
    AttentionCase(rows=((128, 128),), num_heads=2, num_kv_heads=2, head_dim=128),
    AttentionCase(rows=((7, 7), (160, 333), (1, 20), (2, 500)), num_heads=4, num_kv_heads=2, head_dim=128),
    AttentionCase(rows=((300, 700), (1, 90), (129, 129), (1000, 1000)), num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionCase(rows=((300, 700), (1, 90), (129, 129), (1000, 1000)), num_heads=8, num_kv_heads=2, head_dim=64),
    AttentionCase(rows=((300, 700), (64, 64), (129, 1290)), num_heads=4, num_kv_heads=1, head_dim=128, window=200),
    AttentionCase(
        rows=((300, 700), (64, 64), (129, 1290)), num_heads=4, num_kv_heads=1, head_dim=64, window=17, block_size=64
    ),
    AttentionCase(rows=((300, 700), (63, 65), (513, 1290)), num_heads=6, num_kv_heads=2, head_dim=128, block_size=256),
    AttentionCase(rows=((300, 700), (63, 65), (513, 1290)), num_heads=7, num_kv_heads=1, head_dim=64, block_size=8),
    AttentionCase(
        rows=((300, 700), (64, 64), (129, 1290)), num_heads=8, num_kv_heads=1, head_dim=64, window=128, sinks=True
    ),
    AttentionCase(
        rows=((300, 700), (1, 90), (129, 129)), num_heads=8, num_kv_heads=2, head_dim=128, sinks=True, block_size=64
    ),
    AttentionCase(
        rows=((300, 700), (1, 90), (129, 129), (1000, 1000)), num_heads=8, num_kv_heads=2, head_dim=256, block_size=64
    ),
    AttentionCase(rows=((300, 700), (64, 64), (129, 1290)), num_heads=4, num_kv_heads=1, head_dim=256, window=200),
)


@pytest.mark.parametrize("queries", [128, 192])
@pytest.mark.parametrize("pack", [1, 4])
def test_the_work_list_has_every_tile_once_and_the_latest_first_within_a_section(pack: int, queries: int) -> None:
    case = AttentionCase(rows=((1, 3), (300, 700), (129, 129), (1, 9), (128, 428), (5, 9)))
    _, _, _, batch = case.inputs(torch.float32, torch.device("cpu"))
    num_tokens, section = sum(new for new, _ in case.rows), 1000
    items = hopper_items.prefill_items(
        batch.start_R1, batch.kv_len_R, batch.slots_R, num_tokens,
        kv_row_bytes=hopper.CACHED_BYTES // section, few=2, queries=queries, pack=pack,
    )  # fmt: skip
    size = queries // pack
    slots, starts = batch.slots_R.tolist(), batch.start_R1.tolist()
    expected, cached = [], 0
    for row, (new, length) in enumerate(case.rows):
        if new == 1:
            continue
        for first in range(0, new, size):
            entry = [slots[row], starts[row] + first, min(size, new - first), length - new + first]
            expected.append((cached // section, -entry[3], row, entry))
        cached += length
    assert items.count_1.item() == len(expected) <= items.limit
    assert items.ticket_1.item() == 0
    assert items.table_I4[: len(expected)].tolist() == [entry for *_, entry in sorted(expected)]


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "block_size", "expected"),
    [
        ("sm_90", torch.bfloat16, 128, 16, True),
        ("sm_90", torch.float16, 64, 256, True),
        ("sm_90", torch.bfloat16, 256, 64, True),
        ("sm_90", torch.float32, 128, 16, False),
        ("sm_80", torch.bfloat16, 128, 16, False),
        ("sm_90", torch.bfloat16, 96, 16, False),
        ("sm_90", torch.bfloat16, 128, 24, False),
    ],
)
def test_what_is_supported(arch: str, dtype: torch.dtype, head_dim: int, block_size: int, expected: bool) -> None:
    assert hopper.supports(arch, dtype, head_dim, block_size) == expected


@pytest.mark.dealt
@pytest.mark.parametrize(
    "kinds",  # head width, queries, window, sinks, pieces
    [
        [(128, 128, 0, 0), (128, 128, 0, 0, 1), (64, 192, 0, 1), (64, 128, 128, 1)],
        pytest.param(
            [(64, 128, 0, 0), (128, 128, 1000, 0), (256, 128, 0, 0), (64, 128, 0, 1, 1), (256, 128, 0, 0, 1)],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_machine_code_uses_warpgroup_products_and_bulk_copies(kinds: list[tuple[int, ...]]) -> None:
    """Compiled in a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "ignore", __file__, json.dumps(kinds)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    for (head_dim, queries, _, _, *split), line in zip(kinds, run.stdout.splitlines(), strict=True):
        found = json.loads(line)
        keys = 64 if head_dim == 256 else 128
        # Both products of one tile, in all consumers
        assert found["HGMMA"] >= queries // 64 * 2 * (keys // 32 + head_dim // 16)
        assert found["UTMALDG"]
        assert found["USETMAXREG"]
        assert found["HMMA"] == 0
        # What lives from item to item may leave its register, at an item's border. With pieces it has two ends.
        assert found["stack"] < (640 if split else 512)
        # Of 64 exponentials, or 32 with heads of 256, so many come before the wait for the product beside them
        assert found["between"] >= {64: 0, 128: 24, 256: 8}[head_dim]
        # A product that ptxas serializes is followed by a wait of its own.
        assert found["WARPGROUP.DEPBAR"] < found["HGMMA"] // 3


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "queries"), [(False, 128), (True, 128), (True, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_long_rows_equal_the_reference_and_others_are_left_alone(
    case: AttentionCase, dtype: torch.dtype, packed: bool, queries: int
) -> None:
    """With NaN and inf in every cell that no row sees, before its window and in the null block too."""
    device = torch.device("cuda")
    if queries > hopper_items.tile_shape(case.head_dim, 1, 1 << 20, 1)[0]:
        pytest.skip("no registers for so many")
    if not hopper.supports(Platform.of(device).arch, dtype, case.head_dim, case.block_size):
        pytest.skip("not a Hopper GPU")
    q_THD, k_cache, v_cache, batch = case.inputs(dtype, device)
    batch = forgotten(case, batch)
    k_cache, v_cache = spoiled(case, [k_cache, v_cache], batch)
    options = case.options(dtype, device)
    group = case.num_heads // case.num_kv_heads
    pack = group & -group if packed else 1
    expected = paged_attention_reference(q_THD, k_cache, v_cache, batch, **options)
    items = hopper_items.prefill_items(
        batch.start_R1, batch.kv_len_R, batch.slots_R, len(q_THD),
        kv_row_bytes=4 * case.num_kv_heads * case.head_dim, queries=queries, pack=pack,
    )  # fmt: skip
    for bounds in (batch.kv_bound_R, None):  # the second time the ticket must be where the first needed it
        out = torch.full_like(q_THD, torch.nan)
        known = replace(batch, kv_bound_R=bounds)
        hopper.prefill_attention(q_THD, (k_cache, v_cache), known, items, out_THD=out, **options)
        start = 0
        for new, _ in case.rows:
            part = slice(start, start + new)
            if new == 1:
                assert out[part].isnan().all()
            else:
                worst = (out[part].double() - expected[part].double()).abs().max().item()
                assert worst <= 8 * torch.finfo(dtype).eps
            start += new


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "window", "sinks"), [(128, None, False), (64, 200, True), (256, None, False)])
def test_no_bit_depends_on_how_a_row_is_cut_or_on_rows_beside_it(
    head_dim: int, window: int | None, sinks: bool
) -> None:
    """Each query decides for itself when its output is rescaled."""
    device = torch.device("cuda")
    case = AttentionCase(
        rows=((1000, 1000), (777, 900)), num_heads=8, num_kv_heads=2, head_dim=head_dim, window=window, sinks=sinks
    )
    if not hopper.supports(Platform.of(device).arch, torch.bfloat16, head_dim, case.block_size):
        pytest.skip("not a Hopper GPU")
    q_THD, k_cache, v_cache, batch = case.inputs(torch.bfloat16, device)
    q_THD[:1000] *= torch.linspace(0.1, 30, 1000, device=device)[:, None, None]  # some rows' maxima grow often
    options = case.options(torch.bfloat16, device)

    def attend(q: torch.Tensor, rows: RaggedBatch, queries: int, pack: int) -> torch.Tensor:
        items = hopper_items.prefill_items(
            rows.start_R1, rows.kv_len_R, rows.slots_R, len(q), kv_row_bytes=1024, queries=queries, pack=pack
        )
        out = torch.full_like(q, torch.nan)
        hopper.prefill_attention(q, (k_cache, v_cache), rows, items, out_THD=out, **options)
        return out

    whole = attend(q_THD, batch, 128, 1)[:1000]
    assert whole.isfinite().all()
    for begin, end, queries, pack in ((0, 1000, 128, 4), (0, 333, 128, 1), (333, 1000, 128, 4), (51, 1000, 192, 1)):
        if queries > 128 and head_dim > 64:
            continue
        some = replace(
            batch, slots_R=batch.slots_R[:1], kv_bound_R=None, num_tokens_R=None,
            start_R1=torch.tensor([0, end - begin], dtype=batch.start_R1.dtype, device=device),
            kv_len_R=torch.tensor([end], dtype=batch.kv_len_R.dtype, device=device),
        )  # fmt: skip
        assert torch.equal(attend(q_THD[begin:end], some, queries, pack), whole[begin:end])


def machine_code(head_dim: int, queries: int, window: int, sinks: int, split: int = 0) -> dict[str, int]:
    """How often instructions occur, and bytes of stack, of the kernel for a model of today."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    descriptors = {}
    for name, box in {"q_desc": [16, 4, 64], "k_desc": [16, 64], "v_desc": [16, 64]}.items():
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
        descriptors[name] = f"tensordesc<bf16{box},{layout!r}>"
    config = hopper.choose(head_dim, queries)
    constants = {
        "UNITS": 8, "PER_KV": 4, "PACK": 4, "P": 16, "BOX": 16, "D": head_dim,
        "KEYS": config.KEYS, "STAGES": config.STAGES, "QUEUE": config.QUEUE, "WINDOW": window, "SINKS": bool(sinks),
        "CONSUMERS": queries // 64, "PDL": True, "lse_ptr": None, "SPLIT": 8 * split,
        "CONSUMER_REGS": config.CONSUMER_REGS, "PRODUCER_REGS": config.PRODUCER_REGS,
    }  # fmt: skip
    if not sinks:
        constants["sinks_ptr"] = None
    if not split:
        constants |= {"parts_ptr": None, "part_lse_ptr": None}
    types = {
        **descriptors,
        "out_ptr": "*bf16",
        "sinks_ptr": "*bf16",
        "parts_ptr": "*fp32",
        "part_lse_ptr": "*fp32",
        "scale_log2": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    names = prefill_kernel.arg_names
    signature = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name == "out_stride"
    }
    source = GluonASTSource(prefill_kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing, usage = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    wanted = ("HGMMA", "HMMA", "UTMALDG", "USETMAXREG", "WARPGROUP.DEPBAR")
    found = {name: len(re.findall(rf"(?<![A-Z]){re.escape(name)}", listing)) for name in wanted}
    after_scores = listing.split("DEPBAR.LE gsb0, 0x1")[1:]
    found["between"] = min(part.split("DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2") for part in after_scores)
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack
    return {**found, "stack": int(stack[1])}


if __name__ == "__main__":
    for kind in json.loads(sys.argv[1]):
        print(json.dumps(machine_code(*kind)), flush=True)
