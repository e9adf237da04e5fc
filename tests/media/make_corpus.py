"""The script that made the files of tests/media/corpus: pictures, sounds and videos of every form that is taken, and
files that lie or are none. `python -m tests.media.make_corpus` makes them anew, with what Pillow and PyAV are there.

Names begin with the kind that a file is sent as. Those with `bad` are refused.
"""

from __future__ import annotations

import struct
import wave
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

CORPUS = Path(__file__).parent / "corpus"
TURNED = 6  # EXIF's word for a picture that is to be turned by 90° clockwise


def drawing(mode: str = "RGB", width: int = 12, height: int = 8) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([columns * 20 % 256, rows * 30 % 256, (rows + columns) * 10 % 256], axis=2).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int, data: bytes = b"", depth: int = 8, kind: int = 2) -> bytes:
    """A PNG file with these words in its header, whatever the data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def pictures() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = TURNED
    clear = drawing("RGBA")
    clear.putalpha(drawing("L"))
    moves = {"save_all": True, "append_images": [drawing().rotate(180)], "duration": 50}
    palette = drawing().quantize(8)
    deep = Image.fromarray((np.mgrid[:8, :12][1] * 5000).astype(np.uint16))
    return {
        "jpeg": saved(drawing(), "jpeg", quality=90),
        "jpeg-progressive": saved(drawing(), "jpeg", quality=80, progressive=True),
        "jpeg-turned": saved(drawing(), "jpeg", exif=exif),
        "jpeg-cmyk": saved(drawing("CMYK"), "jpeg"),
        "jpeg-gray": saved(drawing("L"), "jpeg"),
        "png": saved(drawing(), "png"),
        "png-16": saved(deep, "png"),
        "png-clear": saved(clear, "png"),
        "png-gray-clear": saved(clear.convert("LA"), "png"),
        "png-palette-clear": saved(palette, "png", transparency=1),
        "png-1": saved(drawing("1"), "png"),
        "png-turned": saved(drawing(), "png", exif=exif),
        "webp": saved(drawing(), "webp", lossless=True),
        "webp-clear": saved(clear, "webp", lossless=True),
        "webp-moves": saved(drawing(), "webp", lossless=True, **moves),
        "gif": saved(palette, "gif"),
        "gif-moves": saved(drawing(), "gif", **moves),
        "bmp": saved(drawing(), "bmp"),
        "tiff": saved(drawing(), "tiff", compression="tiff_lzw"),
        "tiff-16": saved(deep, "tiff"),
    }


def bad_pictures() -> dict[str, bytes]:
    jpeg, palette = saved(drawing(width=64, height=64), "jpeg"), drawing().quantize(8)
    gif, bmp = bytearray(saved(palette, "gif")), bytearray(saved(drawing(), "bmp"))
    gif[6:10], bmp[18:26] = b"\xff" * 4, struct.pack("<ii", 100_000, 100_000)
    huge = bytearray(jpeg)
    at = huge.index(b"\xff\xc0")
    huge[at + 5 : at + 9] = b"\xff" * 4
    none = bytearray(jpeg)
    none[at + 5 : at + 9] = bytes(4)
    return {
        "empty": b"",
        "truncated-jpeg": jpeg[:-60],
        "truncated-png": saved(drawing(), "png")[:-40],
        "header-alone": b"\xff\xd8\xff",
        "huge-png": png(200_000, 200_000),
        "huge-gif": bytes(gif),
        "huge-bmp": bytes(bmp),
        "huge-jpeg": bytes(huge),
        "zero-png": png(0, 0),
        "zero-jpeg": bytes(none),
        "lying-png": png(4000, 4000, b"\0" * 100),
        "wide-png": png(100_000, 1, b"\0" * 300_001),
        "float-tiff": saved(Image.fromarray(np.ones((4, 4), np.float32)), "tiff"),
        "text-bomb-png": png(2, 2, b"\0" * 14)[:33] + _text_chunk(4 << 20) + png(2, 2, b"\0" * 14)[33:],
        "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "svg-plain": b"<svg width='9'/>",
        "pdf": b"%PDF-1.7\n",
        "psd": b"8BPS\0\1" + bytes(20),
        "ps": b"%!PS-Adobe-3.0 EPSF-3.0\n",
        "heic": b"\0\0\0\x18ftypheic" + bytes(12),
        "html": b"<!DOCTYPE html><html></html>",
        "noise": bytes(range(1, 200)),
    }


def _text_chunk(size: int) -> bytes:
    content = b"key\0\0" + zlib.compress(bytes(size))
    return struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))


def wav(samples: np.ndarray, rate: int, width: int = 2) -> bytes:
    file = BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(samples.astype({1: np.uint8, 2: "<i2", 4: "<i4"}[width]).tobytes())
    return file.getvalue()


def tones(rate: int, seconds: float = 0.1) -> np.ndarray:
    """Two channels of 16 bits."""
    times = np.arange(int(rate * seconds)) / rate
    return np.stack([16000 * np.sin(2 * np.pi * 440 * times), 8000 * np.sin(2 * np.pi * 880 * times)], axis=1)


def coded_sound(codec: str, form: str, rate: int) -> bytes:
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="stereo")
        data = np.ascontiguousarray(tones(rate).astype("<i2").reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(data, format="s16", layout="stereo")
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(format=stream.format.name, layout="stereo", rate=rate, frame_size=size)
        for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(piece))
    return file.getvalue()


def sounds() -> dict[str, bytes]:
    return {
        "wav": wav(tones(8000), 8000),
        "wav-8": wav(tones(8000) / 256 + 128, 8000, 1),
        "wav-32": wav(tones(8000) * 65536, 8000, 4),
        "flac": coded_sound("flac", "flac", 16_000),
        "mp3": coded_sound("libmp3lame", "mp3", 16_000),
        "aac": coded_sound("aac", "adts", 16_000),
        "opus": coded_sound("libopus", "ogg", 48_000),
        "webm": coded_sound("libopus", "webm", 48_000),
        "m4a": coded_sound("aac", "mp4", 16_000),
    }


def bad_sounds() -> dict[str, bytes]:
    whole = wav(tones(8000), 8000)
    header = bytearray(wav(np.zeros(0), 8000))
    header[24:28] = struct.pack("<I", 4_000_000_000)
    channels = bytearray(whole)
    channels[22:24] = struct.pack("<H", 60_000)
    return {
        "empty": b"",
        "no-samples": wav(np.zeros(0), 8000),
        "rate": bytes(header) + bytes(64),
        "channels": bytes(channels),
        "playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "header-alone": b"OggS" + bytes(30),
        "no-sound": coded_video("libx264", "mp4"),
    }


def coded_video(codec: str, form: str, frames: int = 12, width: int = 32, height: int = 16, **options: str) -> bytes:
    """A video whose frames are flat, each of another color."""
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.options = width, height, options
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        for index in range(frames):
            pixels = np.full((height, width, 3), (index * 20, 255 - index * 20, 128), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def videos() -> dict[str, bytes]:
    whole = coded_video("libx264", "mp4", g="4", bf="2")
    return {
        "h264": whole,
        "lying": whole.replace(struct.pack(">HH", 32, 16), struct.pack(">HH", 60_000, 60_000)),
        "open-gop": coded_video("libx264", "matroska", g="4", bf="2", **{"x264-params": "open-gop=1:bframes=2"}),
        "vp9": coded_video("libvpx-vp9", "webm"),
        "mpeg4": coded_video("mpeg4", "avi"),
        "gif": coded_video("gif", "gif"),
    }


def bad_videos() -> dict[str, bytes]:
    whole = coded_video("libx264", "mp4")
    return {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "huge": coded_video("mpeg4", "avi", 1, 4096, 2560),
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://169.254.169.254/\n",
        "dash": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"/>',
        "codec": coded_video("ffv1", "matroska"),
        "no-frames": wav_in_mkv(),
    }


def wav_in_mkv() -> bytes:
    return coded_sound("pcm_s16le", "matroska", 8000)


def main() -> None:
    CORPUS.mkdir(exist_ok=True)
    kinds = {"picture": (pictures, bad_pictures), "sound": (sounds, bad_sounds), "video": (videos, bad_videos)}
    for kind, (good, bad) in kinds.items():
        for name, data in good().items():
            (CORPUS / f"{kind}-{name}").write_bytes(data)
        for name, data in bad().items():
            (CORPUS / f"{kind}-bad-{name}").write_bytes(data)


if __name__ == "__main__":
    main()
