"""Pictures, video and sound are decoded as Pillow, transformers and PyAV do it, and bad files get one sentence each."""

from __future__ import annotations

import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from ridgeline.media import images
from ridgeline.media.bounds import BadMedia, MediaBounds
from ridgeline.media.frames import chosen
from ridgeline.media.pool import Decoders
from tests.media.make_corpus import coded_video, drawing, saved, wav

CORPUS = Path(__file__).parent / "corpus"
DECODERS = Decoders()
NAMES = sorted(path.name for path in CORPUS.iterdir())
GOOD = [name for name in NAMES if "-bad-" not in name]
BAD = [name for name in NAMES if "-bad-" in name]


def decoded(name: str, **options: Any) -> Any:
    kind, data = name.split("-")[0], (CORPUS / name).read_bytes()
    return {"picture": DECODERS.picture, "video": DECODERS.clip, "sound": DECODERS.sound}[kind](data, **options)


def expected_picture(data: bytes) -> np.ndarray:
    """What transformers makes of a picture, with transparency laid on white and 16 bits divided by 256."""
    image = Image.open(BytesIO(data))
    if image.mode.startswith("I"):
        return np.repeat((np.asarray(image) // 256).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        rgba = np.asarray(image.convert("RGBA")).astype(np.float64)
        alpha = rgba[:, :, 3:] / 255
        return np.asarray(rgba[:, :, :3] * alpha + 255 * (1 - alpha))
    return np.asarray(load_image(image))


@pytest.mark.parametrize("name", [name for name in GOOD if name.startswith("picture")])
def test_a_picture_is_what_transformers_makes_of_it(name: str) -> None:
    found = decoded(name).pixels_HWC
    expected = expected_picture((CORPUS / name).read_bytes())
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    # transparency is rounded by another rule here than in exact arithmetic, elsewhere nothing is rounded
    assert np.abs(found - expected.astype(np.float64)).max() <= (1 if "clear" in name else 0)


def test_jpeg_files_are_the_same_without_pillows_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By libjpeg-turbo straight into the result: color, gray, turned, CMYK, progressive, and damaged."""
    pytest.importorskip("simplejpeg")
    asked, files = list[tuple[int, ...]](), [path.read_bytes() for path in sorted(CORPUS.glob("picture-*jpeg*"))]
    files += [saved(drawing(width=33, height=17).convert(mode), "jpeg") for mode in ("RGB", "L", "CMYK")]
    files += [saved(drawing(), "jpeg", progressive=True), saved(drawing(), "jpeg")[:-300]]

    def room(shape: Any) -> np.ndarray:
        asked.append(tuple(shape))
        return np.empty(shape, np.uint8)

    def found(file: bytes) -> np.ndarray | str:
        try:
            return images.decode(file, MediaBounds(), room)
        except BadMedia as error:
            return str(error)

    for file in files:
        asked.clear()
        ours = found(file)
        assert len(asked) <= 1  # a caller gives memory once
        with monkeypatch.context() as patched:
            patched.setattr(images, "TURBO", False)
            assert np.array_equal(ours, found(file))


def test_a_picture_larger_than_a_strip_has_all_its_rows() -> None:
    image = drawing(width=1500, height=701)
    found = DECODERS.picture(saved(image, "png")).pixels_HWC
    assert np.array_equal(found, np.asarray(image))
    assert not found.flags.writeable


def test_transparency_takes_the_background_that_is_asked_for() -> None:
    clear = saved(Image.new("RGBA", (3, 2), (9, 9, 9, 0)), "png")
    assert DECODERS.picture(clear, background=(1, 2, 3)).pixels_HWC[0, 0].tolist() == [1, 2, 3]


def test_a_digest_tells_files_and_settings_apart() -> None:
    first, second = saved(drawing(), "png"), saved(drawing(width=13), "png")
    digests = {
        DECODERS.picture(first).digest,
        DECODERS.picture(second).digest,
        DECODERS.picture(first, background=(0, 0, 0)).digest,
        DECODERS.sound(wav(np.arange(800), 8000)).digest,
        DECODERS.sound(wav(np.arange(800), 8000), 4000).digest,
    }
    assert len(digests) == 5
    assert DECODERS.picture(first).digest in digests


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gets_one_sentence(name: str) -> None:
    with pytest.raises(BadMedia) as caught:
        decoded(name)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 300


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("picture-bad-svg", "is SVG or XML, which is not taken"),
        ("picture-bad-huge-png", "200000 by 200000 pixels, of at most"),
        ("picture-bad-zero-png", "cannot be read as PNG"),
        ("picture-bad-truncated-jpeg", "truncated"),
        ("sound-bad-playlist", "is a playlist"),
        ("sound-bad-concat", "is a playlist"),
        ("video-bad-playlist", "is a playlist"),
        ("video-bad-codec", "coded as ffv1"),
        ("video-bad-huge", "4096 by 2560 pixels"),
    ],
)
def test_the_sentence_names_the_fault(name: str, words: str) -> None:
    with pytest.raises(BadMedia, match=words):
        decoded(name)


# ---- sound -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in GOOD if name.startswith("sound")])
def test_a_sound_is_the_mean_of_its_channels_as_pyav_decodes_them(name: str) -> None:
    found = decoded(name)
    with av.open(BytesIO((CORPUS / name).read_bytes())) as container:
        wide = av.AudioResampler(format="dblp")
        frames = [frame for each in container.decode(audio=0) for frame in wide.resample(each)]
        expected = np.concatenate([frame.to_ndarray().mean(axis=0) for frame in frames])
        assert found.rate == container.streams.audio[0].rate
    assert found.samples_N.dtype == np.float32
    assert found.samples_N.shape == expected.shape
    assert np.abs(found.samples_N - expected).max() <= 2**-24  # half of float32's last place below 1


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_a_sound_at_another_rate_is_the_same_tones(rate: int) -> None:
    """Tones up to 92 % of half the lower rate stay within 1e-4, and those above the new half leave nothing. The
    samples near both ends lack neighbours, so they are not compared."""
    half, times = min(rate, 16_000) / 2, np.arange(rate) / rate
    tones = [half * share for share in (0.01, 0.2, 0.5, 0.92)]
    above = [9500.0] if rate > 19_500 else []
    sound = sum(np.sin(2 * np.pi * tone * times) for tone in [*tones, *above]) / 5
    found = DECODERS.sound(wav(np.round(sound * 32767), rate), 16_000).samples_N
    assert len(found) == 16_000
    wanted = np.arange(16_000) / 16_000
    expected = sum(np.sin(2 * np.pi * tone * wanted) for tone in tones) / 5 * 32767 / 32768
    middle = slice(1000, -1000)
    assert np.abs(found[middle] - expected[middle]).max() < 1e-4


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    """Beside other sounds in a step they would spoil these."""
    samples = np.array([0.0, 0.5, value, 0.1] * 400, np.float32)
    form = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    parts = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", samples.nbytes)
    with pytest.raises(BadMedia, match="samples that are no numbers"):
        DECODERS.sound(b"RIFF" + struct.pack("<I", len(parts) + samples.nbytes) + parts + samples.tobytes(), 16_000)


def test_a_sound_that_is_too_long_is_refused() -> None:
    short = Decoders(MediaBounds(sound_seconds=1))
    with pytest.raises(BadMedia, match="more than 1 seconds"):
        short.sound(wav(np.zeros(8001 * 2), 8000))


# ---- video -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in GOOD if name.startswith("video")])
@pytest.mark.parametrize("wanted", [[0], [5], [2, 3, 9], [11, 11], list(range(12))])
def test_chosen_frames_are_those_of_the_whole_video(name: str, wanted: list[int]) -> None:
    data = (CORPUS / name).read_bytes()
    with av.open(BytesIO(data)) as container:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    found = DECODERS.clip(data, lambda total, _: wanted if total == len(frames) else [])
    assert np.array_equal(found.frames_FHWC, np.stack([frames[index][1] for index in wanted]))
    assert found.times_F == pytest.approx([frames[index][0] - frames[0][0] for index in wanted], abs=1e-3)
    assert found.fps == pytest.approx(10, rel=0.01)


def test_frames_are_chosen_as_vllm_does() -> None:
    """The expected indices were computed by hand from `np.linspace(0, total - 1, n, dtype=int)`."""
    assert chosen(5, 30.0) == [0, 1, 2, 3, 4]
    assert chosen(100, 30.0, 4) == [0, 33, 66, 99]
    assert chosen(100, 10.0, -1, 0.5) == [0, 24, 49, 74, 99]
    assert chosen(100, 10.0, 3, 0.5) == [0, 49, 99]
    assert chosen(100, 10.0, -1, 0.01) == [0]
    assert len(chosen(1000, 30.0)) == 32


def test_frames_beyond_the_bounds_are_refused() -> None:
    video = coded_video("libx264", "mp4")
    with pytest.raises(BadMedia, match="12 frames of 32 by 16 pixels"):
        Decoders(MediaBounds(clip_bytes=10_000)).clip(video)
    with pytest.raises(BadMedia, match="of at most 4"):
        Decoders(MediaBounds(frames=4)).clip(video)
    with pytest.raises(BadMedia, match="not in the order of a video of 12 frames"):
        DECODERS.clip(video, lambda total, _: [3, 1])


# ---- what fuzzers send -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
def test_a_damaged_file_is_decoded_or_refused(name: str) -> None:
    data, numbers = (CORPUS / name).read_bytes(), np.random.default_rng([*name.encode()])
    kind = {"picture": DECODERS.picture, "video": DECODERS.clip, "sound": DECODERS.sound}[name.split("-")[0]]
    sentences: list[str] = []
    for _ in range(12):
        damaged = bytearray(data[: int(numbers.integers(1, len(data) + 1))])
        for _ in range(int(numbers.integers(0, 6))):
            damaged[int(numbers.integers(len(damaged)))] = int(numbers.integers(256))
        try:
            kind(bytes(damaged))
        except BadMedia as error:
            sentences.append(str(error))
    assert all(sentence.endswith(".") and "memory" not in sentence for sentence in sentences)
