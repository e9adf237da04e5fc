"""Pictures that come as the vectors of their tower, or in the size that it sees; and text models without a tower."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from ridgeline import LLM, SamplingParams
from ridgeline.assembly import wiring
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.pictures import ShownPictures
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.media.bounds import BadMedia
from ridgeline.media.pool import Decoders
from ridgeline.media.vectors import vectors_of
from ridgeline.perf.hardware import find
from ridgeline.text.media_folder import FolderProcessors
from ridgeline.text.media_prompt import placed_items
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.worker.pictures import rows_of
from tests.vision import crossed, folders, tiny

TinyModel = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_num_batched_tokens": 32}


def chat(llm: LLM, *parts: Any) -> Any:
    words = {"type": "text", "text": "Which?"}
    return llm.chat([{"role": "user", "content": [*parts, words]}], GREEDY)[0]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_a_text_model_alone_takes_the_vectors_of_another_engine(
    family: str, tiny_vision: TinyModel, tmp_path: Path
) -> None:
    """Vectors of layers of the decoder (DeepStack) and places on three axes are among them. The second time they are
    found in the cache."""
    folder = tmp_path / family
    copytree(tiny_vision(family), folder)
    folders.complete(family, folder)
    pixels = tiny.drawn(family, 1)
    with LLM(folder, **SMALL) as whole:
        wanted = chat(whole, {"type": "image", "image": pixels})
        [vectors_LM] = whole.assembly.local.runner.inserted.stored.values()
        weights = whole.assembly.memory.weights
    given = {"image_embeds": vectors_LM, "image_size": list(pixels.shape[:2])}
    with LLM(folder, **SMALL, language_model_only=True, enable_mm_embeds=True) as alone:
        assert alone.assembly.local.runner.decoder.tower is None
        assert alone.assembly.memory.weights < weights
        for _ in range(2):
            found = chat(alone, {"type": "image", "image": given})
            assert found.prompt_token_ids == wanted.prompt_token_ids
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.num_cached_tokens
        other = {**given, "image_embeds": vectors_LM + 1}
        assert chat(alone, {"type": "image", "image": other}).outputs[0].token_ids != wanted.outputs[0].token_ids
        for wrong, said in (
            ({**given, "image_embeds": vectors_LM[1:]}, "vectors here, and there are"),
            ({**given, "image_embeds": vectors_LM[:, 1:]}, "numbers, and the model's have"),
            ({**given, "image_embeds": vectors_LM * torch.nan}, "not finite"),
            ({**given, "image_size": [3]}, "image_size is 2 whole numbers"),
            ({**given, "image_grid_thw": [2, 4, 4]}, "videos do not come as vectors"),
            (pixels, "this model sees no pictures"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                chat(alone, {"type": "image", "image": wrong})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_a_tower_alone_makes_the_vectors_that_texts_alone_take(
    family: str, device: str, tiny_vision: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one server may see, and others read. Devices are known here, so steps are priced."""
    monkeypatch.setattr(wiring, "hardware_of", lambda _: find("H200"))
    small = SMALL | {"device": device, "block_size": 16 if device == "cuda" else 4, "kv_cache_memory": 1 << 26}
    folder = tmp_path / family
    copytree(tiny_vision(family), folder)
    folders.complete(family, folder)
    pixels = tiny.drawn(family, 1)
    with LLM(folder, **small) as whole:
        wanted = chat(whole, {"type": "image", "image": pixels})
        [vectors_LM] = whole.assembly.local.runner.inserted.stored.values()
        weights = whole.assembly.memory.weights
    with LLM(folder, **small, mm_encoder_only=True) as tower:
        assert not tower.assembly.local.runner.decoder.layers
        assert tower.assembly.memory.weights < weights
        for _ in range(2):
            [found] = tower.encode({"prompt": "", "multi_modal_data": {"image": pixels}}, use_tqdm=False)
            # On a GPU graphs of the whole model fill up its patches, and a tower alone has none: other sums of float32
            tolerance = 0.0 if device == "cpu" else 1e-4 * vectors_LM.abs().max().item()
            own_LM = torch.as_tensor(found.outputs.data)
            torch.testing.assert_close(own_LM, vectors_LM.cpu(), rtol=0, atol=tolerance)
        with pytest.raises(InvalidRequest, match="pictures and sounds alone"):
            tower.encode("words", use_tqdm=False)
    given = {"image_embeds": torch.as_tensor(found.outputs.data), "image_size": list(pixels.shape[:2])}
    with LLM(folder, **small, language_model_only=True, enable_mm_embeds=True) as alone:
        assert chat(alone, {"type": "image", "image": given}).outputs[0].token_ids == wanted.outputs[0].token_ids


def test_vectors_need_the_operators_flag(tiny_vision: TinyModel, tmp_path: Path) -> None:
    copytree(tiny_vision("llava"), tmp_path / "llava")
    folder = folders.complete("llava", tmp_path / "llava")
    with LLM(folder, **SMALL, language_model_only=True) as alone:
        with pytest.raises(InvalidRequest, match="set enable_mm_embeds"):
            chat(alone, {"type": "image", "image": torch.zeros(16, 32)})
        assert chat(alone).outputs[0].token_ids
    with pytest.raises(InvalidConfig, match="in whose prompts vectors"):
        LLM(enable_mm_embeds=True)


def test_models_whose_layers_read_pictures_are_whole(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no text model with a tower before it"):
        LLM(crossed.save(tmp_path), **SMALL, language_model_only=True, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "has the tensors none"),
        ({"image_embeds": torch.zeros(2, 4), "more": torch.zeros(1)}, "image_embeds, more"),
        ({"image_embeds": torch.zeros(4)}, r"send \[vectors, width\]"),
        ({"image_embeds": torch.zeros(2, 4, dtype=torch.int32)}, r"send \[vectors, width\]"),
        ({"image_embeds": torch.zeros(2, 0)}, r"send \[vectors, width\]"),
        *(
            ({"image_embeds": torch.full((2, 4), large).to(dtype)}, "not finite numbers from -32768 to 32768")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for large in (-torch.inf, torch.nan, 3.4e38, -33_024.0)
        ),
        ({"image_embeds": torch.zeros(2, 4), "image_size": torch.tensor([0, 4])}, "image_size holds 2 whole numbers"),
        ({"image_embeds": torch.zeros(2, 4), "image_size": torch.zeros(2)}, "image_size holds 2 whole numbers"),
        ({"image_embeds": torch.zeros(2, 4, dtype=torch.complex64)}, "has the type"),
    ],
)
def test_files_that_are_wrong_are_refused_in_a_sentence(tensors: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(BadMedia, match=said):
        vectors_of("image", save(tensors))


def test_bytes_of_a_file_are_read_once() -> None:
    """Otherwise a header of 64 KiB would have the whole file copied a thousand times."""
    told = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("image_embeds", "image_size")}
    header = json.dumps(told).encode()
    with pytest.raises(BadMedia, match="give each bytes of its own"):
        vectors_of("image", len(header).to_bytes(8, "little") + header + bytes(4))


def test_files_are_read_as_they_were_written() -> None:
    vectors_LM = torch.randn(6, 4).bfloat16()
    found = vectors_of("image", save({"image_embeds": vectors_LM, "image_grid_thw": torch.tensor([[1, 4, 6]])}))
    assert (found.embeds.dtype, found.embeds.width, len(found.embeds)) == ("bfloat16", 4, 6)
    assert found.embeds.data == vectors_LM.view(torch.uint8).numpy().tobytes()
    assert found[4] == (4, 6)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert vectors_of("image", save({"image_embeds": torch.full((1, 2), -32_768.0, dtype=dtype)}))
    heard = vectors_of("audio", save({"audio_embeds": vectors_LM}))
    assert heard.digest != found.digest
    for space in range(64):  # a header of 128 bytes begins as a pickle does
        header = b'{"audio_embeds": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}' + b" " * space
        assert len(vectors_of("audio", len(header).to_bytes(8, "little") + header + bytes(4)).embeds) == 1
    with pytest.raises(BadMedia, match="never loaded"):
        vectors_of("image", b"PK\x03\x04" + bytes(64))


def test_a_picture_that_was_resized_before_is_the_same_to_a_tower(tiny_vision: TinyModel, tmp_path: Path) -> None:
    """Servers with an engine on a CPU do so in processes that decode; the key is that of the picture."""
    copytree(tiny_vision("qwen2_5_vl"), tmp_path / "model")
    folder = folders.complete("qwen2_5_vl", tmp_path / "model")
    found = FolderProcessors.of(folder, Tokenizer.from_folder(folder))
    assert found is not None
    pixels, file = np.random.default_rng(1).integers(0, 256, (300, 420, 3), dtype=np.uint8), BytesIO()
    Image.fromarray(pixels).save(file, "png")
    decoders = Decoders(processes=1)
    plain = decoders.picture(file.getvalue())
    view = found.plain.layout(300, 420).whole
    assert view is not None
    ready = decoders.resized(plain, view.height, view.width, found.plain.patching.filter)
    assert ready.ready is not None
    rows, keys = [], []
    for item in (plain, ready):
        [[(shown, key)]] = [each.seen for each in placed_items(found.plain, [item])]
        assert isinstance(shown, ShownPictures)
        rows.append(rows_of([shown], Ops(Platform(device_type="cpu")), torch.float32, torch.device("cpu")))
        keys.append(key)
    assert torch.equal(*rows)
    assert keys[0] == keys[1]
    assert shown.num_bytes < 3 * 300 * 420
    decoders.room.most = 2 * 3 * 300 * 420  # the picture has all that one owner may
    assert decoders.resized(plain, view.height, view.width, found.plain.patching.filter).ready is None
