"""`ridgeline codec`: sounds as codes, and codes as sounds, by EnCodec."""

from __future__ import annotations

import sys
import wave
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ridgeline.cli.training_options import device_of
from ridgeline.core.errors import InvalidRequest

if TYPE_CHECKING:
    from ridgeline.offline.codec import SoundCodec

app = typer.Typer(help="Sounds as codes, and codes as sounds, by EnCodec.", no_args_is_help=True)

MODEL = typer.Option(..., "--model", help="Folder or hub id of an EnCodec for 24 kHz.")
DEVICE = typer.Option("cpu", "--device", help="cpu, cuda or cuda:N.")
QUIET = typer.Option(False, "--quiet", help="No report on standard error.")
PIECE = 1 << 16  # samples that are written at a time


@app.command()
def encode(
    file: Path = typer.Argument(..., metavar="FILE", help="A file of sound."),
    output: Path = typer.Option(None, "--output", "-o", help="The file of codes (FILE with .safetensors)."),
    bandwidth: float = typer.Option(None, help="Thousands of bits a second (the model's lowest)."),
    model: str = MODEL,
    device: str = DEVICE,
    quiet: bool = QUIET,
) -> None:
    """Write a sound's codes: a safetensors file with `codes`, int32 [codebooks, frames]."""
    from safetensors.numpy import save

    data, codec = _read(file, "a sound"), _codec(model, device)
    from ridgeline.media.bounds import MediaBounds
    from ridgeline.media.pool import Decoders

    sound = Decoders(MediaBounds()).sound(data, rate=codec.spec.rate)
    codes = codec.encode(sound.samples_N, bandwidth)
    written = output or file.with_suffix(".safetensors")
    written.write_bytes(save({"codes": codes.astype("int32")}, {"rate": str(codec.spec.rate)}))
    if not quiet:
        seconds = len(sound.samples_N) / codec.spec.rate
        books, frames = codes.shape
        bits = books * frames * (codec.spec.codes - 1).bit_length()
        print(f"{written}: {seconds:.2f} s, {books} x {frames} codes, {bits / seconds:,.0f} bit/s.", file=sys.stderr)


@app.command()
def decode(
    file: Path = typer.Argument(..., metavar="FILE", help="A file of codes, as `encode` writes them."),
    output: Path = typer.Option(None, "--output", "-o", help="The WAV file (FILE with .wav)."),
    model: str = MODEL,
    device: str = DEVICE,
    quiet: bool = QUIET,
) -> None:
    """Write the sound of codes: a WAV file of 16 bits and one channel."""
    import numpy as np

    from ridgeline.media.vectors import WHOLE, read_tensors

    data = _read(file, "codes")
    tensors = read_tensors(data, str(file))
    if tensors.keys() != {"codes"} or tensors["codes"].dtype not in WHOLE:
        raise InvalidRequest(f"{file} is no file of codes; `ridgeline codec encode` writes them.", param="codes")
    dtype, shape, octets = tensors["codes"]
    codec = _codec(model, device)
    samples = codec.decode(np.frombuffer(octets, WHOLE[dtype]).reshape(shape))
    written = output or file.with_suffix(".wav")
    with written.open("wb") as opened, wave.open(opened) as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(codec.spec.rate)
        for start in range(0, len(samples), PIECE):
            part = samples[start : start + PIECE]
            sound.writeframes(np.rint(part.clip(-1, 1) * 32767).astype("<i2").tobytes())
    if not quiet:
        print(f"{written}: {len(samples) / codec.spec.rate:.2f} s.", file=sys.stderr)


def _read(file: Path, what: str) -> bytes:
    if not file.is_file():
        raise InvalidRequest(f"{file} is no file; name a file of {what}.", param="file")
    return file.read_bytes()


def _codec(model: str, device: str) -> SoundCodec:
    from ridgeline.offline.codec import SoundCodec  # torch takes seconds to import; usage errors need not wait
    from ridgeline.weights.folder import resolve_model

    return SoundCodec.from_folder(resolve_model(model, None, None), device_of(device))
