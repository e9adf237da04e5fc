"""A model folder becomes parameters exactly, or one clear sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.errors
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.layers.decoder import Decoder
from ridgeline.weights import transfer
from ridgeline.weights.loader import export_checkpoint, load_weights, read_model_config, resolve_model
from tests import tiny_models
from tests.weights.loading import OPS, empty_decoder, load

TinyModel = Callable[[str], Path]


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    """The sentence that loading ends with; parameters must be untouched by then."""
    config = read_model_config(folder)
    decoder = empty_decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(7.0)
    with pytest.raises(ModelLoadError) as caught:
        load_weights(decoder, folder, config.weights)
    assert all((parameter == 7.0).all() for parameter in decoder.parameters())
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def assert_same(one: Decoder, other: Decoder) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# What loads


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_export_gives_back_the_checkpoint_bit_for_bit(family: str, tiny_model: TinyModel) -> None:
    exported = export_checkpoint(load(tiny_model(family)), read_model_config(tiny_model(family)).weights)
    stored = load_file(tiny_model(family) / "model.safetensors")
    assert exported.keys() == stored.keys()
    for name, tensor in exported.items():
        assert tensor.is_contiguous()
        offset = family.startswith("gemma") or family in tiny_models.ZERO_CENTRED
        if offset and name.endswith("norm.weight"):  # held with 1 added, which rounds in float32
            torch.testing.assert_close(tensor, stored[name], rtol=0, atol=2.0**-23)
        else:
            assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "granite_moe"])
def test_an_export_is_a_copy_that_loads_into_the_same_parameters(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = read_model_config(tiny_model(family))
    decoder = load(tiny_model(family))
    save_file(export_checkpoint(decoder, config.weights), tmp_path / "model.safetensors")
    export_checkpoint(decoder, config.weights).popitem()[1].data.zero_()
    again = empty_decoder(config)
    load_weights(again, tmp_path, config.weights)
    assert_same(again, decoder)
    assert_same(decoder, load(tiny_model(family)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "granite_moe"])
def test_shards_load_like_a_single_file(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    tiny_models.build(family).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(load(tmp_path), load(tiny_model(family)))


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "qwen3_moe"])
def test_the_base_models_prefix_may_be_absent(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """As in the hub's own gpt2, which was saved from the model without its head."""
    shutil.copy(tiny_model(family) / "config.json", tmp_path)
    tiny_models.build(family).base_model.save_pretrained(tmp_path / "base")
    shutil.copy(tmp_path / "base" / "model.safetensors", tmp_path)
    assert not any(name.startswith(("transformer.", "model.")) for name in load_file(tmp_path / "model.safetensors"))
    assert_same(load(tmp_path), load(tiny_model(family)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_cast_to_the_decoders_dtype(dtype: torch.dtype, tiny_model: TinyModel) -> None:
    cast, stored = load(tiny_model("gpt2"), dtype), load(tiny_model("gpt2"))
    for name, parameter in cast.named_parameters():
        assert torch.equal(parameter, stored.get_parameter(name).to(dtype))


def test_buffers_that_follow_from_the_config_are_ignored(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("gpt2"), tmp_path / "gpt2"))
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {
                "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
                "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
                "lm_head.weight": tensors["transformer.wte.weight"].clone(),
            }
        ),
    )
    assert_same(load(folder), load(tiny_model("gpt2")))


def test_progress_rises_to_one(tiny_model: TinyModel) -> None:
    config = read_model_config(tiny_model("llama"))
    seen: list[tuple[str, float]] = []
    load_weights(
        empty_decoder(config),
        tiny_model("llama"),
        config.weights,
        progress=lambda what, part: seen.append((what, part)),
    )
    parts = [part for _, part in seen]
    assert {what for what, _ in seen} == {"loading weights"}
    assert parts == sorted(set(parts))
    assert parts[-1] == 1.0


def test_loading_leaves_parameters_trainable(tiny_model: TinyModel) -> None:
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in load(tiny_model("llama")).parameters())


@pytest.mark.parametrize("family", ["gpt2", "qwen2_moe", "glm4_moe"])
def test_dummy_weights_need_no_files_and_follow_the_seed(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    config = read_model_config(tiny_model(family))

    def dummy(seed: int) -> Decoder:
        decoder = empty_decoder(config, torch.bfloat16)
        load_weights(decoder, tmp_path / "nowhere", config.weights, load_format="dummy", seed=seed)
        return decoder

    decoder = dummy(1)
    assert_same(decoder, dummy(1))
    assert not torch.equal(decoder.embed.weight, dummy(2).embed.weight)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith(("bias", "correction")):
            assert (parameter == 0).all()
        else:  # the standard deviation of n draws is known to about 1 / sqrt(2 n)
            assert parameter.float().std().item() == pytest.approx(0.02, rel=5 / (2 * parameter.numel()) ** 0.5)
            assert abs(parameter.float().mean().item()) < 5 * 0.02 / parameter.numel() ** 0.5


# What does not


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    assert "lacks tensors that config.json asks for: model.layers.1.self_attn.k_proj.weight." in refusal(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name])
    assert "mlp.gate_proj.weight" in refusal(folder)
    assert "and 2 more." in refusal(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "has no place for: model.layers.0.self_attn.q_proj.bias." in refusal(folder)


def test_missing_experts_are_named_and_counted(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "mixtral"))
    gone = "model.layers.1.block_sparse_moe.experts.3"
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if gone in name])
    assert f"asks for: {gone}.w1.weight, {gone}.w3.weight, {gone}.w2.weight." in refusal(folder)
    edit_config(folder, num_local_experts=9)
    assert "asks for: model.layers.0.block_sparse_moe.experts.4.w1.weight, " in refusal(folder)
    edit_config(folder, num_local_experts=3)
    assert "has no place for: model.layers.0.block_sparse_moe.experts.3.w1.weight, " in refusal(folder)


def test_experts_of_another_shape_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("granite_moe"), tmp_path / "granite"))
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    edit_config(folder, num_local_experts=7)
    assert f"{name} is [6, 96, 64], wanted [7, 96, 64]" in refusal(folder)
    edit_config(folder, num_local_experts=6, intermediate_size=40)
    assert f"{name} is [6, 96, 64], wanted [6, 80, 64]" in refusal(folder)


def test_layers_that_draft_are_passed_over_and_no_others(tiny_model: TinyModel, tmp_path: Path) -> None:
    """GLM-4.5's files end with a layer of multi-token prediction, which its config counts."""
    folder = Path(shutil.copytree(tiny_model("glm4_moe"), tmp_path / "glm"))
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight")
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(2, 2) for name in names}))
    assert_same(load(folder), load(tiny_model("glm4_moe")))
    edit_config(folder, num_nextn_predict_layers=0, num_mtp_layers=0)
    assert f"has no place for: {names[0]}, {names[1]}." in refusal(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_tied_head_of_another_shape_is_an_extra_tensor(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("gpt2"), tmp_path / "gpt2"))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 64)}))
    assert "has no place for: lm_head.weight." in refusal(folder)


def test_a_tied_head_with_other_numbers_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """transformers 5 writes such a folder when it saves T5 anew: it says that tables are tied, and stores two."""
    folder = Path(shutil.copytree(tiny_model("gpt2"), tmp_path / "gpt2"))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}))
    assert_same(load(folder), load(tiny_model("gpt2")))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][-1, -1].add_(1))
    assert "stores another one; set tie_word_embeddings to false" in refusal(folder)


def test_a_misshaped_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(111, 64)}))
    assert "model.layers.0.mlp.up_proj.weight is [111, 64], wanted [112, 64]." in refusal(folder)


def test_transposed_weights_are_checked_in_the_checkpoints_layout(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("gpt2"), tmp_path / "gpt2"))
    name = "transformer.h.0.attn.c_attn.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    assert f"{name} is [192, 64], wanted [64, 192]." in refusal(folder)


def test_quantized_numbers_are_not_taken_for_weights(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(112, 64, dtype=torch.int8)}))
    assert f"types we do not load: {name} is I8." in refusal(folder)


@pytest.mark.parametrize("kept", [0, 5, 200, 100_000])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "model.safetensors is damaged or incomplete" in refusal(folder)


def test_a_file_of_noise_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)
    assert "model.safetensors is damaged or incomplete" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} is missing, though the index" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    name = sorted(tensors)[0]
    save_file({**load_file(second), name: tensors[name]}, second)
    assert f"{name} is in both {first} and {second.name}" in refusal(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert "has no weight_map" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    message = refusal(folder)
    assert "only pickled weights; they can run code when opened, so only safetensors are loaded" in message


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json." in refusal(folder)


def test_a_folder_that_vanished_is_refused(folder: Path, tmp_path: Path) -> None:
    config = read_model_config(folder)
    with pytest.raises(ModelLoadError, match="nowhere is not a folder"):
        load_weights(empty_decoder(config), tmp_path / "nowhere", config.weights)


# config.json and the way to the folder


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "config.json does not exist; a model folder needs it."),
        (b"", "cannot be read as JSON"),
        (b'{"a": ', "cannot be read as JSON"),
        (b"\xff\xfe{", "cannot be read as JSON"),
        (b"[1, 2]", "holds list where a JSON object should be"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=sentence):
        read_model_config(tmp_path)


def test_generation_config_is_read_where_there_is_one(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_model_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2], "top_k": 9}))
    config = read_model_config(folder)
    assert (config.eos_token_ids, config.sampling_defaults) == ((4, 2), {"top_k": 9})


def test_an_existing_folder_is_its_own_answer(folder: Path) -> None:
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder), revision="main") == folder


def test_a_hub_id_is_downloaded_without_anything_that_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("someone/some-model", "abc") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("someone/some-model", "abc")

    files = [
        "config.json",
        "model-1.safetensors",
        "tokenizer.model",
        "tiktoken.model",
        "original/x.safetensors",
        "modeling.py",
        "a.bin",
    ]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files, **patterns)) == files[:4]


def test_an_unreachable_model_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host.\nand a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("someone/some-model")
    assert str(caught.value).startswith("no folder is named 'someone/some-model', and as a hub id it cannot be had: ")
    assert "the hub cannot be reached" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("RepositoryNotFoundError", "the hub has no such model, or it is private"),
        ("GatedRepoError", "its owner wants terms to be accepted"),
        ("RevisionNotFoundError", "it has no revision of that name"),
        ("LocalEntryNotFoundError", "the hub cannot be reached, and no copy is on this machine"),
        ("OfflineModeIsEnabled", "HF_HUB_OFFLINE"),
    ],
)
def test_the_hubs_own_errors_are_told_in_our_words(monkeypatch: pytest.MonkeyPatch, error: str, told: str) -> None:
    kind = getattr(huggingface_hub.errors, error)
    failure = kind.__new__(kind)  # their constructors want responses

    def failing(*_: Any, **__: Any) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    with pytest.raises(ModelLoadError, match=told):
        resolve_model("someone/some-model")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_disk_without_room_or_rights_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise OSError(number, os.strerror(number), "/cache/x")

    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    with pytest.raises(ModelLoadError, match=f"/cache/x: {os.strerror(number)} .--download-dir"):
        resolve_model("someone/some-model")


@pytest.mark.parametrize(
    "model", ["models/llama", "models/lama", "llama", "./models/x", "a/b/c", "~/x", "../none-such"]
)
def test_a_folder_that_is_missing_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The hub is asked for what may be a name on it, and for nothing else."""
    asked = list[str]()

    def failing(name: str, **_: Any) -> str:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama2").mkdir(parents=True)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(model)
    assert asked == ([model] if model in ("models/llama", "models/lama", "llama") else [])
    assert ("did you mean 'models/llama2'" in str(caught.value)) is (model in ("models/llama", "models/lama"))
    assert "a hub id such as Qwen/Qwen3-0.6B" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [("", "no model was given"), ("/no/such folder", "the folder '/no/such folder' does not exist")],
)
def test_a_name_that_can_be_neither_is_refused(model: str, sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence):
        resolve_model(model)


def test_a_file_is_not_a_model(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json' is a file; give the folder"):
        resolve_model(folder / "config.json")


class _Stream:
    """A stream that notes what the host waits for."""

    def __init__(self, waits: list[object]) -> None:
        self.waits, self.behind = waits, list[object]()

    def wait_event(self, event: object) -> None:
        self.behind.append(event)

    def synchronize(self) -> None:
        self.waits.append(self)


def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> _Stream:
    current = _Stream([])
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return current


def test_after_an_error_the_rest_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_gpu(monkeypatch)
    monkeypatch.setattr(transfer, "_Lane", lambda device: SimpleNamespace(stream=_Stream([])))
    reads = []

    def read(index: int) -> torch.Tensor:
        reads.append(index)
        if index == 3:
            raise OSError("a damaged disk")
        time.sleep(0.01)
        return torch.ones(2, dtype=torch.float64)  # cast, so that no lane is needed

    targets = [torch.zeros(2) for _ in range(200)]
    filling = transfer.fill(((t, partial(read, i)) for i, t in enumerate(targets)), torch.device("cpu"))
    with pytest.raises(OSError, match="a damaged disk"):
        list(filling)
    assert len(reads) < 100
    assert all(targets[i].tolist() == [1, 1] for i in reads if i != 3), "threads still write after the error"


def test_tensors_of_one_thread_do_not_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts are hundreds of small tensors, and each wait would leave the bus idle. The one at the end
    suffices."""
    current, sent, streams = _no_gpu(monkeypatch), [], []
    waits = current.waits

    class Lane:
        def __init__(self, device: torch.device) -> None:
            self.stream = _Stream(waits)
            streams.append(self.stream)

        def send(self, source: Tensor, target: Tensor) -> None:
            sent.append(len(source))
            target.copy_(source)

    monkeypatch.setattr(transfer, "_Lane", Lane)
    monkeypatch.setattr(transfer, "BUFFER_BYTES", 24)
    targets = [torch.zeros(2, 5) for _ in range(20)]
    reads = ((target, partial(torch.full, (2, 5), float(index))) for index, target in enumerate(targets))
    assert sum(transfer.fill(reads, torch.device("cpu"))) == 200
    assert sorted(sent) == [16] * 20 + [24] * 20
    assert all((target == index).all() for index, target in enumerate(targets))
    assert all(len(stream.behind) == 1 for stream in streams), "a thread may write before earlier work has ended"
    assert len(waits) == len(streams) + 1
    assert set(waits) == {*streams, current}


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_bytes", [1 << 12, 32 << 20])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "qwen3_moe", "granite_moe", "glm4_moe"])
def test_a_gpu_gets_the_same_weights(
    tiny_model: TinyModel, family: str, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pieces smaller than a tensor too; GPT-2's are transposed on the way, and bfloat16 is cast."""
    monkeypatch.setattr("ridgeline.weights.transfer.BUFFER_BYTES", buffer_bytes)
    folder = tiny_model(family)
    config = read_model_config(folder)
    for dtype in (torch.float32, torch.bfloat16):
        here = Decoder(config.spec, OPS, dtype=dtype, device=torch.device("cpu"))
        there = Decoder(config.spec, OPS, dtype=dtype, device=torch.device("cuda"))
        for decoder in (here, there):
            load_weights(decoder, folder, config.weights)
        other = dict(there.named_parameters())
        assert all(torch.equal(p, other[name].cpu()) for name, p in here.named_parameters())
