"""GGUF's blocks kept as codes: the bits of the gguf package's numbers, and the logits of the model of these numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.layers.linear import Linear
from ridgeline.quantization.held import formed
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.weights.blocks import BLOCKS
from ridgeline.weights.formats.gguf_file import TENSOR_TYPES
from ridgeline.weights.quantized.gguf import Gguf
from ridgeline.weights.stored import StoredTensor
from tests import gguf_files, tiny_models
from tests.weights.loading import dense_logits, load
from tests.weights.random_blocks import SIGNS, random_blocks
from tests.weights.test_quantized import assert_same_numbers, kept

gguf = pytest.importorskip("gguf")

NUMBERS = {type.name: number for number, type in TENSOR_TYPES.items()}
IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(3))


def of_blocks(name: str, data: np.ndarray, shape: tuple[int, ...]) -> Coded:
    """The form that a stored tensor of such blocks gets."""
    blocks = torch.from_numpy(data).view(-1, TENSOR_TYPES[NUMBERS[name]].bytes)
    stored = StoredTensor(list(shape), name, lambda: torch.empty(0), blocks=lambda: blocks)
    piece = Gguf().piece("blk.0.attn_q", shape, {"blk.0.attn_q.weight": stored})
    assert piece is not None
    assert piece.problem({"blk.0.attn_q.weight": stored}) is None
    form = formed(piece.held, {field: read(lambda name: torch.empty(0)) for field, read in piece.read.items()})
    assert isinstance(form, Coded)
    copies = int(np.prod(shape[:-2]))
    assert copies * piece.held.num_bytes(shape[-2], shape[-1]) == form.nbytes
    return form


@pytest.mark.parametrize("shape", [(24, 512), (3, 8, 768)], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_planes_stand_for_the_numbers_of_the_blocks_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    type, count = TENSOR_TYPES[NUMBERS[name]], int(np.prod(shape))
    data = random_blocks(NUMBERS[name], 4 * count // type.block)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(NUMBERS[name])).reshape(len(data), -1)
    finite = np.isfinite(wanted).all(1)
    data, wanted = data[finite][: count // type.block], wanted[finite][: count // type.block]
    assert len(data) == count // type.block
    form = of_blocks(name, data, shape)
    got = form.dequantized().numpy()
    assert got.shape == shape
    got, wanted = got.reshape(-1), wanted.astype(np.float32).reshape(-1)
    if name in SIGNS:
        got, wanted = got + 0.0, wanted + 0.0
    assert (got.view(np.uint32) == wanted.view(np.uint32)).all()
    if how := re.match("IQ[123]|TQ1", name):  # a value's magnitude and sign take four bits, and a digit two
        assert form.nbytes * 8 / count < (4.6 if how[0] != "TQ1" else 2.2)
    else:
        assert form.nbytes <= data.nbytes * 1.2  # of Q2_K, whose scales of four bits take eight


def test_a_scale_that_is_no_number_is_refused() -> None:
    data = np.zeros((16, 18), np.uint8)
    data[3, :2] = (0x00, 0x7E)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight holds 1 scales like nan"):
        of_blocks("Q4_0", data, (16, 32))
    for name, place, byte in (("MXFP4", 0, 255), ("TQ2_0", 65, 0x7F), ("IQ2_S", 1, 0x7F), ("IQ1_M", 55, 0x7F)):
        data = np.full((16, TENSOR_TYPES[NUMBERS[name]].bytes), 0x10, np.uint8)
        data[3, place] = byte
        if name == "IQ1_M":  # whose scale is in the high bits of four words
            data[3, 49:56:2] = 0xF0
        with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight holds 1 scales (like|that are) (nan|NaN)"):
            of_blocks(name, data, (16, TENSOR_TYPES[NUMBERS[name]].block))


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q4_0"), ("qwen3", "Q4_0"), ("phi3", "Q4_0"), ("qwen3_moe", "Q4_0"), ("llama", "MXFP4")],
)
def test_a_file_of_several_types_is_the_model_of_its_numbers(family: str, kind: str, tmp_path: Path) -> None:
    """Of a llama, queries and keys have their rows in another order; values have more bits than both; and the output
    layer of a Qwen3 is the embedding's table."""
    changes = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {"intermediate_size": 128}
    model = tiny_models.build(family, **changes)
    kinds = {"*": kind, "blk.0.attn_v.weight": "Q8_0", "blk.1.attn_v.weight": "F32", "blk.1.ffn_up.weight": "Q5_1"}
    path = gguf_files.write(model, tmp_path / "model.gguf", kinds=kinds)
    plain, decoder = load(path), kept(path)
    count = 2 * (4 if family != "qwen3_moe" else 3) + 1
    assert assert_same_numbers(decoder, plain) >= count - (family == "phi3") - 1
    decoder.prepare()
    if family == "llama":
        qkv = decoder.get_submodule("layers.0.mixer.qkv")
        assert isinstance(qkv, Linear)
        assert isinstance(qkv.matrix, JoinedWeight)
        assert len(qkv.matrix.weights) == 2
    torch.testing.assert_close(dense_logits(decoder, IDS), dense_logits(plain, IDS), rtol=1e-4, atol=1e-4)
