"""DeepSeek's kernels for the arguments of our ops, as sweeps time them beside ours: DeepGEMM (the packages deep-gemm
and sgl-deep-gemm, or what deepgemm.py built of their headers) and FlashMLA (its own package, or as vLLM's wheel has
it).

    ridgeline bench sweep fp8_linear --beside --form block fed
    ridgeline bench sweep latent_attention --beside

What they take in place of our op's contract:

    fp8_linear        weights in blocks of 128 x 128 alone, no bias. Activations are rounded before, and their scales
                      laid out as DeepGEMM reads them, neither of which is in its time. Ours rounds in the form "block";
                      the form "fed" has the same inputs for both
    latent_attention  rows of one token. Pages have 64 tokens, so a copy of the cache is made in such pages before. It
                      cuts rows into pieces once, as an engine does for all layers of a step

DeepGEMM's package compiles a kernel when it is first called, with nvcc.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.gemm.fp8.op import IN_BLOCKS, Fp8, round_activations
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline_bench.sweep import deepgemm

PAGE = 64  # tokens, the only size that FlashMLA's dense kernel takes
FLASH_MLA = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
Call = Callable[[], Any]


def _of_blocks(product: Callable[..., Call], x_TI: Tensor | Rounded, weight: Fp8, bias_O: Tensor | None) -> Call:
    """Prepare a product with activations that are rounded. Raises ValueError for what DeepGEMM does not take."""
    if not weight.format.block or bias_O is not None:
        raise ValueError("DeepGEMM multiplies by weights in blocks without a bias.")
    if x_TI.dtype != torch.bfloat16:
        raise ValueError(f"DeepGEMM's products are in bfloat16, not {x_TI.dtype}.")
    if isinstance(x_TI, Rounded):
        if not x_TI.grouped:
            raise ValueError("DeepGEMM takes activations with a scale for each 128 inputs.")
        q_TI, scale_TC = x_TI.q_TI, x_TI.scale.T.contiguous()
    else:
        q_TI, scale_TC = round_activations(x_TI, IN_BLOCKS, None)
    return product(q_TI, scale_TC, weight.weight_OI, weight.scale_SC)


def _by_package(q_TI: Tensor, scale_TC: Tensor, weight_OI: Tensor, scale_SC: Tensor) -> Call:
    multiply = importlib.import_module("deep_gemm").fp8_gemm_nt
    aligned = importlib.import_module("deep_gemm.utils.layout").get_mn_major_tma_aligned_tensor(scale_TC)
    y_TO = torch.empty(len(q_TI), len(weight_OI), dtype=torch.bfloat16, device=q_TI.device)

    def call() -> Tensor:
        multiply((q_TI, aligned), (weight_OI, scale_SC), y_TO)
        return y_TO

    return call


fp8_linear = partial(_of_blocks, _by_package)


def latent_attention(q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, batch: RaggedBatch, *, scale: float) -> Call:
    """FlashMLA's dense kernel for decoding. Raises ValueError for what it does not take."""
    if batch.tokens_each != 1 or batch.tree is not None:
        raise ValueError("FlashMLA's dense kernel takes rows of one token each.")
    found = next((name for name in FLASH_MLA if _there(name)), FLASH_MLA[0])
    flash = importlib.import_module(found)
    cache_NPGW, table_RC = in_pages(cache_NPW, batch)
    q_RTHW = torch.cat((q_THL, q_THY), dim=-1)[:, None]
    length_R, plan = batch.kv_len_R.int(), flash.get_mla_metadata()[0]

    def call() -> Tensor:
        out_RTHL: Tensor = flash.flash_mla_with_kvcache(
            q_RTHW, cache_NPGW, table_RC, length_R, q_THL.shape[-1], plan, None, scale, False
        )[0]
        return out_RTHL[:, 0]

    return call


def in_pages(cache_NPW: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Return a copy of the rows' tokens in pages [N, 64, 1, W], zero behind their last ones, and the table [R, C] of
    these pages, int32."""
    length_R, block = batch.kv_len_R.tolist(), cache_NPW.shape[1]
    columns = -(-max(length_R) // PAGE)
    paged = cache_NPW.new_zeros(len(length_R), columns * PAGE, cache_NPW.shape[2])
    for row, (slot, length) in enumerate(zip(batch.slots_R.tolist(), length_R, strict=True)):
        blocks = batch.block_table_SC[slot, : -(-length // block)].long()
        paged[row, :length] = cache_NPW[blocks].flatten(0, 1)[:length]
    table_RC = torch.arange(len(length_R) * columns, dtype=torch.int32, device=paged.device).view(-1, columns)
    return paged.view(-1, PAGE, 1, cache_NPW.shape[2]), table_RC


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the package around it is not there, or it is no file's
        return False


def found() -> dict[str, dict[str, Callable[..., Call]]]:
    """Return the peers whose packages are installed: op → name → what prepares a call."""
    peers: dict[str, dict[str, Callable[..., Call]]] = {}
    if _there("deep_gemm"):
        peers["fp8_linear"] = {"deepgemm": fp8_linear}
    if deepgemm.LIBRARY.exists():
        ways = {name: partial(_of_blocks, product) for name, product in deepgemm.PRODUCTS.items()}
        peers.setdefault("fp8_linear", {}).update(ways)
    if any(map(_there, FLASH_MLA)):
        peers["latent_attention"] = {"flashmla": latent_attention}
    return peers
