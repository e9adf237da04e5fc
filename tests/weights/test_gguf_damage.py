"""A GGUF file whose values are damaged is a model that can be built, or one clear sentence, at once."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import ModelLoadError
from ridgeline.models import model_config
from ridgeline.weights.formats.gguf_file import GGUF, read_gguf
from ridgeline.weights.gguf.config import DIALECTS, gguf_config
from ridgeline.weights.gguf.names import gguf_weights
from tests import gguf_files, gguf_near
from tests.weights.loading import load
from tests.weights.test_gguf import written

pytest.importorskip("gguf")

MISSING = object()
WRONG = (MISSING, 0, -1, 1, 2**40, 2**63, 1e30, float("nan"), float("inf"), True, "x", "", [], [0], [2**40], ["x"])
SECONDS = 5.0  # of any one file; most take some milliseconds
ONE_EACH = {architecture: family for family, architecture in gguf_files.ARCHITECTURES.items()}
ONE_EACH |= {written.architecture: family for family, written in gguf_near.FAMILIES.items()}


def changed(gguf: GGUF, name: str, value: Any) -> GGUF:
    values = {key: each for key, each in gguf.values.items() if key != name}
    return replace(gguf, values=values if value is MISSING else {**values, name: value})


@pytest.mark.parametrize("architecture", ONE_EACH)
def test_every_value_may_be_missing_absurd_or_of_another_type(architecture: str, tmp_path: Path) -> None:
    gguf = read_gguf(written(ONE_EACH[architecture], tmp_path))
    names = [name for name in gguf.values if name.startswith(f"{architecture}.")]
    read = model_config(gguf_config(gguf))
    assert gguf_weights(gguf, read.weights, read.spec)
    said = []
    for name in names:
        for value in WRONG:
            start = time.perf_counter()
            said.append(refusal(changed(gguf, name, value)))
            assert time.perf_counter() - start < SECONDS, (name, value)
    sentences = [each for each in said if each]
    assert len(sentences) > 3 * len(names)
    assert all("\n" not in each and len(each) < 1000 for each in sentences)


def refusal(gguf: GGUF) -> str:
    """The sentence with which a file is refused; "" if it describes a model."""
    try:
        found = model_config(gguf_config(gguf))
        gguf_weights(gguf, found.weights, found.spec)
    except ModelLoadError as error:
        return str(error)
    return ""


def test_a_stack_that_counts_more_matrices_than_there_can_be_is_refused_at_once(tmp_path: Path) -> None:
    path = written("gemma3n", tmp_path)
    data = bytearray(path.read_bytes())
    name = text("altup_proj.weight")
    struct.pack_into("<QQQ", data, data.index(name) + len(name) + 4, 0, 0, MANY)
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"altup_proj"):
        load(path)


def test_a_share_of_zeros_that_is_no_number_is_refused(tmp_path: Path) -> None:
    gguf = read_gguf(written("gemma3n", tmp_path))
    count = gguf.values["gemma3n.block_count"]
    with pytest.raises(ModelLoadError, match="activation_sparsity_scale"):
        gguf_config(changed(gguf, "gemma3n.activation_sparsity_scale", [float("nan")] * count))


def test_an_architecture_that_we_do_not_know_is_named_with_those_we_do(tmp_path: Path) -> None:
    gguf = changed(read_gguf(written("arcee", tmp_path)), "general.architecture", "plamo3")
    with pytest.raises(ModelLoadError, match=r"holds the architecture 'plamo3'; as GGUF we read .*arcee, .*seed_oss"):
        gguf_config(gguf)
    assert set(DIALECTS) - set(ONE_EACH) == {"bert", "gemma"}  # an encoder, and Gemma 2's form with less in it


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, offset: int, *shape: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


KIND = text("general.architecture") + struct.pack("<I", 8) + text("llama")
MANY = 10**12


@pytest.mark.parametrize(
    ("values", "tensors", "counts", "says"),
    [
        ([KIND], [tensor("a", 0, 64), tensor("b", 255, 64)], (), "data of b lie over"),
        ([KIND], [tensor("b", 0, 64), tensor("a", 0, 64)], (), "lie over those of another"),
        ([KIND], [tensor("a", 0, 64), tensor("a", 256, 64)], (), "a tensor is in it twice"),
        ([KIND, KIND], [], (), "a value is in it twice"),
        ([KIND], [tensor("a\n\x1b[31m" * 99, 0, 64)], (), r"names a value or a tensor 'a\\n"),
        ([KIND], [tensor("a" * 300, 0, 64)], (), "names a value or a tensor 'aaa"),
        ([KIND], [tensor("a", 0, MANY)], (), "ends before the data of a"),
        ([KIND], [tensor("a", 0, 2**63, 2**63)], (), "ends before the data of a"),
        ([KIND], [], (MANY, 1), "promises 1000000000000 tensors"),
        ([KIND], [], (0, MANY), "1000000000000 values"),
        ([KIND, text("x") + struct.pack("<IIQ", 9, 0, MANY)], [], (), "promises 1000000000000 entries"),
        ([KIND, text("x") + struct.pack("<IIQ", 9, 8, MANY)], [], (), "promises 1000000000000 entries"),
        ([KIND, text("x") + struct.pack("<IIQIQ", 9, 9, 1, 0, 1)], [], (), "a value of type 9"),
        ([KIND, text("x") + struct.pack("<IQ", 8, MANY)], [], (), "ends too early"),
    ],
)
def test_a_header_that_contradicts_itself_or_promises_too_much_is_refused_at_once(
    values: list[bytes], tensors: list[bytes], counts: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    path, counted = tmp_path / "model.gguf", counts or (len(tensors), len(values))
    path.write_bytes(b"".join((b"GGUF", struct.pack("<IQQ", 3, *counted), *values, *tensors, bytes(100_000))))
    start = time.perf_counter()
    with pytest.raises(ModelLoadError, match=says) as caught:
        read_gguf(path)
    assert time.perf_counter() - start < SECONDS
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_tensors_may_lie_in_another_order_than_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    parts = tensor("b", 256, 64), tensor("a", 0, 64), tensor("none", 256, 0)
    path.write_bytes(b"".join((b"GGUF", struct.pack("<IQQ", 3, 3, 1), KIND, *parts, bytes(1000))))
    found = read_gguf(path).tensors
    assert list(found) == ["b", "a", "none"]
    assert found["b"].start - found["a"].start == 256
