"""The network of a codec of sounds. Every part sees earlier samples alone, so a sound may come in pieces.

Legend:
    C  channels
    t  places in time, at any rate
    Q  codebooks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.models.encodec import CodecSpec

Read = Callable[[str], Tensor]  # a parameter by its name in the files
Memory = dict[int, object]  # what parts keep between the pieces of a sound, by their numbers


class CausalConv:
    """A convolution, or with `rises` a transposed one, whose weight is stored as lengths and directions."""

    def __init__(self, read: Read, name: str, stride: int = 1, dilation: int = 1, rises: bool = False) -> None:
        self.weight = torch._weight_norm(read(f"{name}.conv.weight_v"), read(f"{name}.conv.weight_g"), 0)
        self.bias = read(f"{name}.conv.bias")
        self.stride, self.dilation, self.rises = stride, dilation, rises
        self.before = 1 if rises else (self.weight.shape[2] - 1) * dilation + 1 - stride

    def forward(self, x_Ct: Tensor, memory: Memory, key: int) -> Tensor:
        """Return the output of a piece of which so much is due, and remember what the next piece needs."""
        if self.rises:
            return self._risen(x_Ct, memory, key)
        kept_Ct = memory.get(key)
        short = -x_Ct.shape[1] % self.stride  # only of the last piece
        if isinstance(kept_Ct, Tensor):
            x_Ct = torch.cat((kept_Ct, x_Ct), dim=1)
            padded_Ct = _mirrored(x_Ct, 0, short)
        else:
            padded_Ct = _mirrored(x_Ct, self.before, short)
        memory[key] = padded_Ct[:, padded_Ct.shape[1] - self.before :]
        return F.conv1d(padded_Ct[None], self.weight, self.bias, self.stride, 0, self.dilation)[0]

    def _risen(self, x_Ct: Tensor, memory: Memory, key: int) -> Tensor:
        kept_Ct, stride = memory.get(key), self.stride
        memory[key] = x_Ct[:, -1:]
        joined_Ct = torch.cat((kept_Ct, x_Ct), dim=1) if isinstance(kept_Ct, Tensor) else x_Ct
        y_Ct = F.conv_transpose1d(joined_Ct[None], self.weight, self.bias, stride)[0]
        end = joined_Ct.shape[1] * stride
        return y_Ct[:, end - x_Ct.shape[1] * stride : end]


def _mirrored(x_Ct: Tensor, left: int, right: int) -> Tensor:
    """Return x with its first and last places mirrored at its ends. Zeros follow what is too short for that."""
    if not left and not right:
        return x_Ct
    more = max(0, max(left, right) - x_Ct.shape[1] + 1)
    padded_Ct = F.pad(F.pad(x_Ct, (0, more))[None], (left, right), mode="reflect")[0]
    return padded_Ct[:, : padded_Ct.shape[1] - more]


class CausalBlock:
    """A residual block: x + conv(elu(conv(elu(x))))."""

    def __init__(self, read: Read, name: str, spec: CodecSpec, index: int) -> None:
        self.first = CausalConv(read, f"{name}.block.1", dilation=spec.growth**index)
        self.second = CausalConv(read, f"{name}.block.3")
        self.shortcut = CausalConv(read, f"{name}.shortcut") if spec.shortcut else None

    def forward(self, x_Ct: Tensor, memory: Memory, key: int) -> Tensor:
        y_Ct = self.first.forward(F.elu(x_Ct), memory, key)
        y_Ct = self.second.forward(F.elu(y_Ct), memory, key + 1)
        return y_Ct + (x_Ct if self.shortcut is None else self.shortcut.forward(x_Ct, memory, key + 2))


class CausalLSTM:
    """x + LSTM(x)."""

    def __init__(self, read: Read, name: str, layers: int) -> None:
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self.weights = [read(f"{name}.lstm.{kind}_l{n}") for n in range(layers) for kind in kinds]
        self.layers, self.width = layers, self.weights[1].shape[1]

    def forward(self, x_Ct: Tensor, memory: Memory, key: int) -> Tensor:
        state = memory.get(key)
        if not isinstance(state, tuple):
            state = (x_Ct.new_zeros(self.layers, 1, self.width),) * 2
        y, *state = torch.lstm(x_Ct.T[:, None], state, self.weights, True, self.layers, 0.0, False, False, False)
        memory[key] = tuple(state)
        return x_Ct + y[:, 0].T


class ELU:
    """The activation between parts."""

    def forward(self, x_Ct: Tensor, memory: Memory, key: int) -> Tensor:
        return F.elu(x_Ct)


Part = CausalConv | CausalBlock | CausalLSTM | ELU


def encoder_parts(spec: CodecSpec, read: Read) -> Iterator[Part]:
    """Yield the parts of the encoder in their order: samples [1, t] become frames [width, t / hop]."""
    place = iter(range(1 << 16))
    name: Callable[[], str] = lambda: f"encoder.layers.{next(place)}"  # noqa: E731
    yield CausalConv(read, name())
    for ratio in reversed(spec.ratios):
        for index in range(spec.residuals):
            yield CausalBlock(read, name(), spec, index)
        next(place)
        yield ELU()
        yield CausalConv(read, name(), stride=ratio)
    yield CausalLSTM(read, name(), spec.lstm_layers)
    next(place)
    yield ELU()
    yield CausalConv(read, name())


def decoder_parts(spec: CodecSpec, read: Read) -> Iterator[Part]:
    """Yield the parts of the decoder in their order: frames become samples."""
    place = iter(range(1 << 16))
    name: Callable[[], str] = lambda: f"decoder.layers.{next(place)}"  # noqa: E731
    yield CausalConv(read, name())
    yield CausalLSTM(read, name(), spec.lstm_layers)
    for ratio in spec.ratios:
        next(place)
        yield ELU()
        yield CausalConv(read, name(), stride=ratio, rises=True)
        for index in range(spec.residuals):
            yield CausalBlock(read, name(), spec, index)
    next(place)
    yield ELU()
    yield CausalConv(read, name())


def through(parts: list[Part], x_Ct: Tensor, memory: Memory) -> Tensor:
    """Return the output of all parts for one piece of a sound."""
    for number, part in enumerate(parts):
        x_Ct = part.forward(x_Ct, memory, 4 * number)
    return x_Ct


def coded(x_Ct: Tensor, books: list[Tensor]) -> Tensor:
    """Return the nearest vector of each codebook to what those before it left over: int64 [Q, t]."""
    left_tC, found = x_Ct.T, []
    for book in books:
        distances = left_tC.square().sum(1, keepdim=True) - 2 * left_tC @ book.T + book.square().sum(1)
        found.append(distances.argmin(1))
        left_tC = left_tC - book[found[-1]]
    return torch.stack(found)


def uncoded(codes_Qt: Tensor, books: list[Tensor]) -> Tensor:
    """Return the sums of these vectors: [C, t]."""
    vectors = [book[codes_t] for codes_t, book in zip(codes_Qt, books, strict=False)]
    return torch.stack(vectors).sum(0).T
