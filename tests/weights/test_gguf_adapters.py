"""Adapters in GGUF files, written with the gguf package as llama.cpp's converter writes them, beside PEFT."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LoRARequest
from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http.adapters import below
from ridgeline.weights.convert.convert import convert

pytest.importorskip("peft")
pytest.importorskip("gguf")

import gguf

from tests import gguf_files, tiny_models
from tests.peft_adapters import PeftAdapter, PlainModel
from tests.test_lora import PARAMS, PROMPTS, check, open_llm

TinyModel = Callable[[str], Path]
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "gpt2": "gpt2"}


def convert_adapter(
    adapted: PeftAdapter, family: str, path: Path, *, values: dict[str, Any] | None = None, kind: str = "F32"
) -> Path:
    """Write PEFT's matrices with the names and orders of a GGUF file."""
    config = tiny_models.build(family).config
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    given = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(adapted.config["lora_alpha"]),
    }
    for name, value in (given | (values or {})).items():
        gguf_files.add(writer, name, value)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for theirs, tensor in load_file(adapted.folder / "adapter_model.safetensors").items():
        module, half = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.weight", theirs).groups()
        numbers = tensor.float().numpy()
        if half == "B" and architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            numbers = gguf_files._permuted(numbers, heads)
        dtype = np.float16 if kind == "F16" else np.float32
        name = names.get_name(module) or names.get_name(module.removeprefix("transformer."))
        writer.add_tensor(f"{name}.weight.lora_{half.lower()}", np.ascontiguousarray(numbers, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logprobs_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """On a model of a folder, and of a GGUF file where these say all that the family has."""
    adapted = PeftAdapter(family, tmp_path / "peft", rank_pattern={"o_proj": 2})
    (tmp_path / "adapter").mkdir()
    file = convert_adapter(adapted, family, tmp_path / "adapter" / "adapter.gguf")
    models = [tiny_model(family)]
    if family == "llama":
        models.append(gguf_files.write(tiny_models.build(family), tmp_path / "model.gguf"))
    for model, path in zip(models, (file, file.parent), strict=False):
        with open_llm(model) as llm:
            prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in range(2)]
            named = [LoRARequest("a", 1, path), None] * len(PROMPTS)
            oracles = [adapted, PlainModel(family)] * len(PROMPTS)
            for output, oracle in zip(
                llm.generate(prompts, PARAMS, lora_request=named, use_tqdm=False), oracles, strict=True
            ):
                check(output, oracle)


def test_merged_weights_are_those_of_peft(tiny_model: TinyModel, tmp_path: Path) -> None:
    adapted = PeftAdapter("llama", tmp_path / "peft")
    file = convert_adapter(adapted, "llama", tmp_path / "adapter.gguf")
    how: dict[str, Any] = {"dtype": None, "shard_size": 10**9, "write_texts": lambda *_: None}
    convert(tiny_model("llama"), tmp_path / "merged", **how, progress=lambda *_: None, adapter=file)
    wanted = adapted.model.merge_and_unload().state_dict()
    for name, found in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-5)


def test_a_file_below_the_folder_of_a_server_lies_there_itself(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "own", root / "linked", outside):
        folder.mkdir(parents=True)
    for folder in (root / "own", outside):
        (folder / "adapter.gguf").write_bytes(b"GGUF")
    (root / "linked" / "adapter.gguf").symlink_to(outside / "adapter.gguf")
    assert below(root, "own") == root / "own"
    with pytest.raises(BadRequest, match="below the server's --lora-dir"):
        below(root, "linked")


def test_damaged_and_foreign_files_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    adapted = PeftAdapter("llama", tmp_path / "peft")
    whole = convert_adapter(adapted, "llama", tmp_path / "whole.gguf").read_bytes()
    cases = {
        "'adapter' and 'lora'": convert_adapter(
            adapted, "llama", tmp_path / "a.gguf", values={"general.type": "model"}
        ),
        "up to a million": convert_adapter(adapted, "llama", tmp_path / "b.gguf", values={"adapter.lora.alpha": 1e9}),
        "with rank up to max_lora_rank 16": convert_adapter(
            PeftAdapter("llama", tmp_path / "wide", r=17), "llama", tmp_path / "c.gguf"
        ),
        "not finite": convert_adapter(_endless(tmp_path / "endless"), "llama", tmp_path / "d.gguf"),
        "this model lacks": convert_adapter(PeftAdapter("gpt2", tmp_path / "gpt2"), "gpt2", tmp_path / "e.gguf"),
    }
    for said, changed in (("bytes", whole + bytes(1 << 25)), ("GGUF", whole[:200]), ("GGUF", b"")):
        cases[f"{said}|{len(changed)}"] = path = tmp_path / f"{len(changed)}.gguf"
        path.write_bytes(changed)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:-100])
    cases["behind|end|short|damaged"] = cut
    with open_llm(tiny_model("llama")) as llm:
        for number, (said, path) in enumerate(cases.items(), 1):
            with pytest.raises(InvalidRequest, match=said.partition("|")[0] if said[-1:].isdigit() else said):
                llm.generate("", PARAMS, lora_request=LoRARequest("a", number, path))
        [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS, use_tqdm=False)
        check(output, PlainModel("llama"))


def _endless(folder: Path) -> PeftAdapter:
    adapted = PeftAdapter("llama", folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.full_like(tensors[name], torch.inf)}, path)
    return adapted
