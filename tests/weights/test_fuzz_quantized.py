"""Quantized folders of strangers: a config, a header, values or lengths that are wrong. The answer is a model or one
sentence, before memory is taken for what the files do not hold."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.errors import RidgelineError
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.weights.loader import read_model_config, with_cache
from tests.damaged_files import damaged_bytes, damaged_json
from tests.weights.loading import load
from tests.weights.quantized_files import SCHEMES, quantize
from tests.weights.test_quantized import kept

CASES = 40  # `python -m tests.weights.test_fuzz_quantized` runs two thousand
DTYPES = (torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64)
SAYS: dict[str, list[Any]] = {
    "kv_cache_scheme": [{"num_bits": 8, "type": "float", "dynamic": False}, {"num_bits": 2**40, "type": []}, "static"],
    "kv_cache_quant_algo": ["FP8", "NVFP4", 8],
    "quant_method": list({str(each.config.get("quant_method")) for each in SCHEMES.values()}),
    "quantization": [{"quant_algo": "FP8"}, {"quant_algo": ["NVFP4"]}],
    "group_size": [2**62, -(2**62), 8, 24],
    "bits": [2**40, 3, 8],
    "dynamic": [{"+:.*": {"bits": 8}}, {"-:(": {}}, {"x" * 5000: None}],
    "extra_config": [{"model.layers.0.mlp.up_proj": {"bits": 2}}, {".*(": {"bits": 2}}, {"a": 1}],
}


def _config(folder: Path, rng: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    damaged = damaged_json(config["quantization_config"], rng, SAYS)
    (folder / "config.json").write_bytes(
        json.dumps({**config, "quantization_config": 0})[:-2].encode() + damaged + b"}"
    )


def _header(folder: Path, rng: random.Random) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    for _ in range(rng.choice([1, 2])):
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
            break
        match rng.randrange(3):
            case 0:
                entry["dtype"] = rng.choice(["F32", "I8", "U8", "F8_E4M3", "I64", "BOOL", "F8_E8M0", "F4", "x"])
            case 1:
                entry["shape"] = rng.choice([[], [0], [2**40, 2**30], entry["shape"][::-1], [*entry["shape"], 1]])
            case 2:
                entry["data_offsets"] = rng.choice([[0, 2**50], [8, 0], [0, 0], entry["data_offsets"][:1]])
    spelled = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(spelled)) + spelled + data[8 + size :])


def _bytes(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else damaged_bytes(data, rng))


def _tensors(folder: Path, rng: random.Random) -> None:
    """One of a quantized module's tensors, or more, replaced by another."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(name for name in tensors if "_proj." in name or "scale" in name)
    for name in rng.sample(names, rng.choice([1, 1, 3])):
        old = tensors[name]
        match rng.randrange(6):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = torch.zeros(old.shape).to(rng.choice(DTYPES))
            case 2:
                tensors[name] = old.flatten()[: max(0, old.numel() - rng.choice([1, 8, 128]))].clone()
            case 3:
                noise = torch.randint(0, 256, (old.nbytes,), dtype=torch.uint8)
                tensors[name] = noise.view(old.dtype).view(old.shape) if old.nbytes else old
            case 4:
                if old.is_floating_point():
                    tensors[name] = torch.full(old.shape, rng.choice([float("nan"), 0.0, -1.0, 1e30])).to(old.dtype)
            case 5:
                place = name.rpartition(".")[0].rpartition(".")[0]
                tensors[f"{place}.{rng.choice(['k_scale', 'kv_scale', 'g_idx', 'weight'])}"] = torch.rand(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (_config, _config, _header, _bytes, _tensors, _tensors)


def outcome(whole: Callable[[str], Path], place: Path, number: int) -> tuple[str, str]:
    """What becomes of a case, and what it was."""
    rng = random.Random(number)
    torch.manual_seed(number)
    name = rng.choice(list(SCHEMES))
    damage = rng.choice(DAMAGES)
    shutil.rmtree(place, ignore_errors=True)
    damage(Path(shutil.copytree(whole(name), place)), rng)
    what = f"case {number}: {name}, {damage.__name__}"
    before, began = _peak(), time.process_time()
    try:
        with_cache(place, read_model_config(place), kv_format("auto"))
        load(place)
        kept(place).prepare()
        found = "loaded"
    except RidgelineError as error:
        sentence = str(error)
        found = "refused" if sentence.endswith(".") and "\n" not in sentence else f"no sentence: {sentence!r}"
    except Exception as error:
        found = f"raised {type(error).__name__}: {error}"
    if _peak() - before > 200e6 or time.process_time() - began > 5:
        found = f"{found}, in {time.process_time() - began:.1f} s and {(_peak() - before) / 1e6:.0f} MB"
    return found, what


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def models(folder: Path) -> Callable[[str], Path]:
    """Models of one layer, written when they are first needed."""

    def whole(name: str) -> Path:
        place = folder / name.replace(" ", "-") / "model"
        return place if place.exists() else quantize("llama", SCHEMES[name], place, num_hidden_layers=1)[0]

    return whole


def test_damaged_folders_are_loaded_or_refused_with_a_sentence(tmp_path: Path) -> None:
    whole = models(tmp_path / "whole")
    found = [outcome(whole, tmp_path / "damaged", number) for number in range(CASES)]
    assert [each for each in found if each[0] not in ("loaded", "refused")] == []
    assert min(Counter(each for each, _ in found)[each] for each in ("loaded", "refused")) > CASES // 6


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        whole, counts = models(Path(temporary) / "whole"), Counter[str]()
        for number in range(*map(int, sys.argv[1:3])):
            result, what = outcome(whole, Path(temporary) / "damaged", number)
            counts[result[:40]] += 1
            if result not in ("loaded", "refused"):
                print(what, "→", result[:300], flush=True)
        print(counts)
