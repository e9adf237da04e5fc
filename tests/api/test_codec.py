"""EnCodec's codes and sounds beside transformers' model of the same files, whole and in pieces.

Sounds of float32 may differ by the order of sums over some hundred inputs in twenty layers: 1e-4 of their largest
number. Codes are whole numbers and equal.
"""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import EncodecConfig, EncodecModel

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.models.encodec import codec_spec
from ridgeline.offline.codec import SoundCodec
from tests.command import run_here

SMALL: dict[str, Any] = {
    "num_filters": 4,
    "hidden_size": 16,
    "codebook_size": 64,
    "upsampling_ratios": [5, 4, 2],
    "num_residual_layers": 2,
    "target_bandwidths": [4.0, 18.0],
    "sampling_rate": 24000,
}
HOP = 40


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> tuple[EncodecModel, SoundCodec]:
    torch.manual_seed(4)
    model = EncodecModel(EncodecConfig(**SMALL)).eval()
    for layer in model.quantizer.layers:
        layer.codebook.embed.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("encodec")
    model.save_pretrained(folder)
    return model, SoundCodec.from_folder(folder)


def sound(length: int) -> np.ndarray:
    return np.random.default_rng(length).normal(0, 0.3, length).astype(np.float32)


@pytest.mark.parametrize("bandwidth", [4.0, 18.0])
@pytest.mark.parametrize("length", [1, HOP, 7 * HOP + 3, 31 * HOP, 12 * HOP + 39])
def test_codes_and_sounds_are_those_of_transformers(
    length: int, bandwidth: float, codec: tuple[EncodecModel, SoundCodec]
) -> None:
    model, ours = codec
    samples = sound(length)
    with torch.inference_mode():
        wanted = model.encode(torch.from_numpy(samples)[None, None], bandwidth=bandwidth)
        heard = model.decode(wanted.audio_codes, wanted.audio_scales).audio_values[0, 0].numpy()
    codes = ours.encode(samples, bandwidth)
    assert codes.tolist() == wanted.audio_codes[0, 0].tolist()
    assert codes.shape == (ours.spec.books(bandwidth), -(-length // HOP))
    np.testing.assert_allclose(ours.decode(codes), heard, atol=1e-4 * np.abs(heard).max())


@pytest.mark.gpu
def test_a_gpu_has_the_codes_and_sounds_of_transformers(codec: tuple[EncodecModel, SoundCodec], tmp_path: Path) -> None:
    """Of transformers on a CPU. Codes of float32 sums in another order may differ where two vectors of a book are
    equally near, and with them the codes of further books there."""
    model, _ = codec
    model.save_pretrained(tmp_path)
    ours, samples = SoundCodec.from_folder(tmp_path, "cuda"), sound(2000 * HOP + 7)
    with torch.inference_mode():
        wanted = model.encode(torch.from_numpy(samples)[None, None], bandwidth=18.0).audio_codes[0, 0]
        heard = model.decode(wanted[None, None], [None]).audio_values[0, 0].numpy()
    assert np.mean(ours.encode(samples, 18.0) == wanted.numpy()) > 0.999
    np.testing.assert_allclose(ours.decode(wanted.numpy()), heard, atol=1e-4 * np.abs(heard).max())
    stream = ours.stream(18.0)
    pieces = [stream.encode(samples[start : start + 5000]) for start in range(0, len(samples), 5000)]
    found = np.concatenate((*pieces, stream.finish()), axis=1)
    assert np.mean(found == wanted.numpy()) > 0.999


@pytest.mark.parametrize("pieces", [(1,) * 5, (HOP * 9, 3, 500), (13, 280, 1, 1, HOP)])
def test_pieces_have_the_codes_and_samples_of_the_whole(
    pieces: tuple[int, ...], codec: tuple[EncodecModel, SoundCodec]
) -> None:
    _, ours = codec
    samples = sound(25 * HOP + 7)
    whole, stream, first = ours.encode(samples, 18.0), ours.stream(18.0), 0
    found = list[np.ndarray]()
    for length in (*pieces, len(samples)):
        found.append(stream.encode(samples[first : first + length]))
        first += length
    codes = np.concatenate((*found, stream.finish()), axis=1)
    assert codes.tolist() == whole.tolist()
    heard = [stream.decode(whole[:, start : start + 3]) for start in range(0, whole.shape[1], 3)]
    joined, wanted = np.concatenate((*heard, stream.drain())), ours.decode(whole)
    np.testing.assert_allclose(joined, wanted, atol=1e-4 * np.abs(wanted).max())
    assert not len(heard[0])
    assert stream.encode(samples[: 8 * HOP]).tolist() == ours.encode(samples[: 8 * HOP], 18.0).tolist()  # another sound


def test_what_cannot_be_coded_is_refused(codec: tuple[EncodecModel, SoundCodec], tmp_path: Path) -> None:
    _, ours = codec
    with pytest.raises(InvalidRequest, match=r"bandwidth is 6.0, and this codec has 4.0, 18.0"):
        ours.encode(sound(9), 6.0)
    with pytest.raises(InvalidRequest, match="finite numbers of float32 in one channel"):
        ours.encode(np.full(9, np.nan, np.float32))
    with pytest.raises(InvalidRequest, match="codes are whole numbers from 0 to 63"):
        ours.decode(np.full((2, 3), 64))
    for entries, why in (
        ({"normalize": True}, "only the form for 24 kHz runs"),
        ({"use_causal_conv": False}, "only EnCodec with True runs"),
        ({"model_type": "mimi"}, "only EnCodec with 'encodec' runs"),
        ({"codebook_size": 1000}, "must be a power of 2"),
    ):
        with pytest.raises(ModelLoadError, match=why):
            codec_spec({"model_type": "encodec", **entries})


def test_the_command_line_writes_codes_and_their_sound(codec: tuple[EncodecModel, SoundCodec], tmp_path: Path) -> None:
    model, ours = codec
    folder, samples = tmp_path / "model", (sound(12 * HOP) / 4).clip(-0.9, 0.9)
    model.save_pretrained(folder)
    with wave.open(str(tmp_path / "said.wav"), "wb") as file:
        file.setparams((1, 2, 24000, 0, "NONE", ""))
        file.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())
    said, codes, again = tmp_path / "said.wav", tmp_path / "said.safetensors", tmp_path / "again.wav"
    ran = run_here("codec", "encode", said, "--model", folder, "--bandwidth", "18")
    assert ran.returncode == 0, ran.stderr
    assert "0.02 s" in ran.stderr
    stored = load_file(codes)["codes"]
    assert stored.dtype == np.int32
    heard = np.rint(samples * 32767).astype(np.float32) / 32768
    assert stored.tolist() == ours.encode(heard, 18.0).tolist()
    assert run_here("codec", "decode", codes, "--model", folder, "--output", again).returncode == 0
    with wave.open(str(again)) as file:
        assert file.getparams()[:3] == (1, 2, 24000)
        found = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
    assert np.abs(found - ours.decode(stored).clip(-1, 1)).max() < 1e-4
    nowhere = tmp_path / "no folder" / "file"
    for said_so, *words in (
        ("safetensors", "decode", again),
        ("is no file", "decode", tmp_path / "none"),
        ("no folder/file cannot be used", "decode", codes, "--output", nowhere),
        ("no folder/file cannot be used", "encode", said, "--output", nowhere),
        ("unknown device 'gpu'", "encode", said, "--device", "gpu"),
        ("does not exist; this machine", "decode", codes, "--device", "cuda:99"),
    ):
        ran = run_here("codec", *words, "--model", folder)
        assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
        assert said_so in ran.stderr
