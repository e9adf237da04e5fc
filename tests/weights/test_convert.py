"""What `ridgeline convert` writes is what it read, to the bit, and transformers reads it; or nothing is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.core.errors import InvalidConfig, ModelLoadError, RidgelineError
from ridgeline.text.gguf_export import write_texts
from ridgeline.weights.convert.convert import check, convert
from ridgeline.weights.convert.shards import parse_size
from ridgeline.weights.head_files import head_config
from ridgeline.weights.loader import read_model_config
from tests import gguf_files, tiny_models
from tests.test_draft_heads import glm_with_mtp
from tests.text.sample_tokenizers import byte_level, write_folder
from tests.weights.loading import dense_logits, load

pytestmark = pytest.mark.usefixtures("forked_ranks")

TinyModel = Callable[[str], Path]

IDS = torch.randint(3, tiny_models.VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))


def silent(what: str, fraction: float) -> None:
    assert 0 <= fraction <= 1


def converted(source: Path, target: Path, *, dtype: str | None = None, shard_size: int = 10**9) -> Path:
    convert(source, target, dtype=dtype, shard_size=shard_size, write_texts=write_texts, progress=silent)
    return target


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer, which a test may damage."""
    copy = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    return write_folder(copy, byte_level(), chat_template="{{ messages[0].content }}")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mixtral", "granite_moe_shared"])
def test_a_folder_is_the_same_again_in_shards(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model(family)
    target = converted(source, tmp_path / "out", shard_size=150_000)
    names = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert all(path.stat().st_size < 150_000 + 4096 for path in target.glob("*.safetensors"))
    assert_same_bits(tensors_of(target), tensors_of(source))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto", attn_implementation="eager")
    assert_same_bits(oracle.state_dict(), tiny_models.build(family).state_dict())
    again = converted(target, tmp_path / "again")
    assert [path.name for path in again.glob("*.safetensors*")] == ["model.safetensors"]
    assert_same_bits(tensors_of(again), tensors_of(source))


def test_other_files_come_along(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "modeling.py").write_text("raise SystemExit")
    target = converted(folder, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert json.loads((target / name).read_text()) == json.loads((folder / name).read_text())
    assert not [path for path in target.iterdir() if path.suffix in (".bin", ".py")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_rounds_as_torch_does(dtype: str, folder: Path, tmp_path: Path) -> None:
    target = converted(folder, tmp_path / "out", dtype=dtype)
    kind = getattr(torch, dtype)
    assert_same_bits(tensors_of(target), {name: each.to(kind) for name, each in tensors_of(folder).items()})
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    oracle = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert oracle.dtype == kind


@pytest.mark.parametrize("family", ["llama3", "gemma3", "phi3", "granite", "mixtral", "qwen3_moe"])
def test_a_gguf_file_becomes_a_folder_that_transformers_loads(family: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    changes = gguf_files.CHANGES.get(family, {})
    model = tiny_models.build(family, **changes)
    target = converted(gguf_files.write(model, tmp_path / "model.gguf"), tmp_path / "out")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto", attn_implementation="eager")
    expected = model.state_dict()
    assert oracle.state_dict().keys() == expected.keys()
    for name, tensor in oracle.state_dict().items():
        # Gemma's norms lose the digits that the 1 added to them took.
        atol = 1e-6 if family.startswith("gemma") and name.endswith("norm.weight") else 0
        torch.testing.assert_close(tensor, expected[name], atol=atol, rtol=0)
    with torch.no_grad():
        wanted = model(IDS).logits
        torch.testing.assert_close(oracle(IDS).logits, wanted, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(dense_logits(load(target), IDS), wanted, atol=2e-4, rtol=1e-4)


def test_a_quantized_file_keeps_its_tokenizer_and_template(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    backend = byte_level()
    spec = json.loads(backend.to_str())
    special = {token["content"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    extra = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [special.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    }
    model = tiny_models.build("qwen3", vocab_size=len(tokens), intermediate_size=128)
    path = gguf_files.write(model, tmp_path / "model.gguf", kinds={"*": "Q8_0"}, extra=extra)
    target = converted(path, tmp_path / "out")
    oracle = transformers.AutoTokenizer.from_pretrained(target)
    text = "def fibonacci(n):  <|im_end|> 12"
    assert oracle.encode(text) == backend.encode(text).ids
    assert oracle.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi"
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    stored = tensors_of(target)["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(stored, gguf_files.dequantized(weight, "Q8_0").bfloat16())


def test_the_layer_for_multi_token_prediction_comes_along(tmp_path: Path) -> None:
    source, _ = glm_with_mtp(tmp_path / "model", "deepseek_v3")
    target = converted(source, tmp_path / "out", dtype="bfloat16", shard_size=10**6)
    theirs = tensors_of(source)
    assert any(name.startswith("model.layers.3.") for name in theirs)
    assert_same_bits(tensors_of(target), {name: each.bfloat16() for name, each in theirs.items()})
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1
    head_config("mtp", target, read_model_config(target).spec, files=True)  # which refuses files without the layer
    assert check(target, silent).tensors == len(theirs)


def test_a_layer_that_is_not_written_is_not_counted(tmp_path: Path) -> None:
    """One that is stored in codes is left out, and so is one that the files never held."""
    source, _ = glm_with_mtp(tmp_path / "model", "deepseek_v3")
    for number, edit in enumerate((to_codes, without_layer)):
        change(source, edit)
        target = converted(source, tmp_path / f"out{number}")
        assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 0
        assert not [name for name in tensors_of(target) if name.startswith("model.layers.3.")]
        check(target, silent)


def to_codes(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.3.eh_proj.weight"].to(torch.float8_e4m3fn)


def without_layer(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        del tensors[name]


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path, target: Path, **how: str) -> str:
    """The sentence of both, after which there is no trace of the target."""
    with pytest.raises(RidgelineError) as caught:
        converted(folder, target, **how)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    return message


def test_damage_is_named_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    target, name = tmp_path / "out", "model.layers.0.mlp.up_proj.weight"
    whole = (folder / "model.safetensors").read_bytes()

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][3, 4], tensors[name][0, 0] = float("nan"), float("-inf")

    change(folder, spoil)
    assert refusal(folder, target) == f"{folder} holds 2 values that are NaN or infinite in {name}; copy it again."
    with pytest.raises(ModelLoadError, match="2 values"):
        check(folder, silent)
    (folder / "model.safetensors").write_bytes(whole)
    change(folder, lambda tensors: tensors.pop(name))
    assert name in refusal(folder, target)
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert "damaged or incomplete" in refusal(folder, target)


def test_values_that_the_dtype_cannot_hold_are_counted(folder: Path, tmp_path: Path) -> None:
    change(folder, lambda tensors: tensors["model.norm.weight"][:3].fill_(1e6))
    assert "3 values of model.norm.weight are too large for float16" in refusal(
        folder, tmp_path / "out", dtype="float16"
    )


def test_a_tied_weight_stored_again_is_dropped_if_it_is_the_same(tmp_path: Path, tiny_model: TinyModel) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "model"))
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert check(folder, silent).copies == ["lm_head.weight"]
    assert_same_bits(tensors_of(converted(folder, tmp_path / "out")), tensors_of(tiny_model("qwen3")))
    shutil.rmtree(tmp_path / "out")
    change(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "stores another one" in refusal(folder, tmp_path / "out")


def test_a_full_folder_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="exists already"):
        converted(folder, folder)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MB", "1GiB", "77")] == [5 * 10**9, 1_500_000, 1 << 30, 77]
    for wrong in ("", "GB", "-1GB", "5 boxes", "0"):
        with pytest.raises(InvalidConfig, match="is no size"):
            parse_size(wrong)


def test_the_file_is_laid_out_as_the_library_wants_it(folder: Path, tmp_path: Path) -> None:
    """Mixed types in one file: every tensor begins at a multiple of its size."""
    change(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].bfloat16()}))
    path = converted(folder, tmp_path / "out") / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0


def test_the_command(folder: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ridgeline", "convert", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(folder, tmp_path / "out", "--dtype", "bfloat16", "--shard-size", "100KB", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["parameters"] == sum(each.numel() for each in tensors_of(folder).values())
    wrong = run(folder)
    assert wrong.returncode == 2
    assert wrong.stderr == "ridgeline: convert needs a folder to write to, or --check and none.\n"
