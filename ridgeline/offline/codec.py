"""Codes of sounds and sounds of codes, by EnCodec for 24 kHz. On CPUs and GPUs, in float32.

codec = SoundCodec.from_folder("models/encodec_24khz")
codes = codec.encode(samples, bandwidth=6.0)  # int64 [codebooks, frames]
samples = codec.decode(codes)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.layers.codec import Memory, coded, decoder_parts, encoder_parts, through, uncoded
from ridgeline.layers.precision import in_float32
from ridgeline.models.encodec import CodecSpec, codec_spec
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.formats.mistral_files import folder_config

LENGTHS = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
LEAST = 7  # frames of the first piece of a stream: all kernels can mirror its beginning


class SoundCodec:
    """The codec of a folder."""

    def __init__(self, spec: CodecSpec, folder: Path, device: str | torch.device = "cpu") -> None:
        self.spec, self.device = spec, torch.device(device)
        with open_checkpoint(folder) as stored:

            def read(name: str) -> Tensor:
                head, _, last = name.rpartition(".")
                found = next((n for n in (name, f"{head}.{LENGTHS.get(last)}") if n in stored), None)
                if found is None:
                    raise ModelLoadError(f"{folder} lacks the tensor {name}, which its config.json asks for.")
                return stored[found].read().float().to(self.device)

            self.encoder, self.decoder = list(encoder_parts(spec, read)), list(decoder_parts(spec, read))
            names = (f"quantizer.layers.{n}.codebook.embed" for n in range(spec.most_books))
            self.books = [read(name) for name in names]

    @staticmethod
    def from_folder(folder: str | Path, device: str | torch.device = "cpu") -> SoundCodec:
        """Return the codec of a model folder. Raise ModelLoadError for another codec, or for missing tensors."""
        path = Path(folder)
        return SoundCodec(codec_spec(folder_config(path, required=True)), path, device)

    def encode(self, samples: np.ndarray, bandwidth: float | None = None) -> np.ndarray:
        """Return the codes of a sound: int64 [codebooks, frames], a frame for each started `spec.hop` samples.

        samples: float32 [samples] at `spec.rate`. bandwidth: one of the model's, in 1,000 bits a second; None: its
        lowest. Raise InvalidRequest.
        """
        stream = self.stream(bandwidth)
        return np.concatenate((stream.encode(samples), stream.finish()), axis=1)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the sound of codes, int64 [codebooks, frames]: float32 [frames · hop]. Raise InvalidRequest."""
        return self._samples(self._checked(codes), {})

    def stream(self, bandwidth: float | None = None) -> CodecStream:
        """Return the codec for one sound that comes in pieces. Raise InvalidRequest."""
        known = self.spec.bandwidths
        wanted = min(known) if bandwidth is None else bandwidth
        if wanted not in known:
            told = ", ".join(map(str, known))
            raise InvalidRequest(f"bandwidth is {wanted!r}, and this codec has {told}.", param="bandwidth")
        return CodecStream(self, self.spec.books(wanted))

    def _checked(self, codes: np.ndarray) -> np.ndarray:
        found = np.asarray(codes)
        good = found.ndim == 2 and 0 < len(found) <= len(self.books) and found.shape[1] and found.dtype.kind in "iu"
        if not good or found.min() < 0 or found.max() >= self.spec.codes:
            raise InvalidRequest(
                f"codes are whole numbers from 0 to {self.spec.codes - 1} [1 to {len(self.books)} codebooks, frames], "
                f"got {found.dtype} {list(found.shape)}.",
                param="codes",
            )
        return found

    @torch.inference_mode()
    def _codes(self, samples: np.ndarray, books: int, memory: Memory) -> np.ndarray:
        x_Ct = torch.from_numpy(samples).to(self.device)[None]
        # A code is the nearest vector of a book, so after rounding another one would be the nearest
        with in_float32():
            return coded(through(self.encoder, x_Ct, memory), self.books[:books]).cpu().numpy()

    @torch.inference_mode()
    def _samples(self, codes: np.ndarray, memory: Memory) -> np.ndarray:
        codes_Qt = torch.from_numpy(codes.astype(np.int64)).to(self.device)
        with in_float32():
            found: np.ndarray = through(self.decoder, uncoded(codes_Qt, self.books), memory)[0].cpu().numpy()
        return found


class CodecStream:
    """One sound in pieces, in either direction. All pieces together have the codes, or samples, of the whole sound, as
    its convolutions and its LSTM see earlier samples alone. The first output waits for `LEAST` frames."""

    def __init__(self, codec: SoundCodec, books: int) -> None:
        self._codec, self._books = codec, books
        self._encoding: Memory = {}
        self._decoding: Memory = {}
        self._samples = np.zeros(0, np.float32)
        self._codes: np.ndarray | None = None

    def encode(self, samples: np.ndarray) -> np.ndarray:
        """Return the codes of all frames that are complete with this piece, float32 [samples]: int64 [codebooks,
        frames]. Raise InvalidRequest."""
        given = np.asarray(samples)
        if given.ndim != 1 or given.dtype != np.float32 or not np.isfinite(given).all():
            raise InvalidRequest(
                f"samples are finite numbers of float32 in one channel, got {given.dtype} {list(given.shape)}.",
                param="samples",
            )
        waiting, hop = np.concatenate((self._samples, given)), self._codec.spec.hop
        frames = len(waiting) // hop
        if frames < (1 if self._encoding else LEAST):
            self._samples = waiting
            return np.zeros((self._books, 0), np.int64)
        self._samples = waiting[frames * hop :]
        return self._codec._codes(waiting[: frames * hop], self._books, self._encoding)

    def finish(self) -> np.ndarray:
        """Return the codes of what is left at the sound's end. The next piece begins another sound."""
        left, memory = self._samples, self._encoding
        self._samples, self._encoding = left[:0], {}
        if not len(left):
            return np.zeros((self._books, 0), np.int64)
        return self._codec._codes(left, self._books, memory)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the samples of a piece of codes. Those of the first frames come once there are `LEAST`, or with
        `drain`. Raise InvalidRequest."""
        given = self._codec._checked(codes)
        waiting = given if self._codes is None else np.concatenate((self._codes, given), axis=1)
        if not self._decoding and waiting.shape[1] < LEAST:
            self._codes = waiting
            return np.zeros(0, np.float32)
        self._codes = None
        return self._codec._samples(waiting, self._decoding)

    def drain(self) -> np.ndarray:
        """Return the samples of codes that still wait, at the end of a sound of fewer than `LEAST` frames."""
        left, memory = self._codes, self._decoding
        self._codes, self._decoding = None, {}
        return np.zeros(0, np.float32) if left is None else self._codec._samples(left, memory)
