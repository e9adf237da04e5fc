"""A tower as data that makes tokens of pictures: the encoder of a VQ-VAE, whose codes are tokens of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.specs.tower import TowerSpec

HELD = 6  # tensors as large as the largest input of a convolution that lie in memory together, with its own room


class Convolution(NamedTuple):
    """A convolution of a picture.

    name: in the files. taps: along an axis. places: of its output, for each token of the picture.
    """

    name: str
    inputs: int
    outputs: int
    taps: int
    places: int

    @property
    def weights(self) -> int:
        """The numbers of its matrix."""
        return self.inputs * self.taps**2 * self.outputs


class Sees(NamedTuple):
    """A layer in which all places of a picture see each other. name: in the files. places: as of a convolution."""

    name: str
    channels: int
    places: int


@dataclass(frozen=True, kw_only=True)
class CodedTowerSpec(TowerSpec):
    """A tower of convolutions. Each patch of a picture gets the number of the code that is nearest to its vector, and
    the code is a token, so its vector is a row of the model's table (van den Oord et al., arXiv 1711.00937; Esser et
    al., arXiv 2012.09841).

    side: a picture has side x side patches. first: channels of the first convolution.
    channels: of each level. Every level but the last one ends by halving both sides of the picture.
    blocks: residual blocks of a level. seeing: levels with a layer behind each block in which all places see each
        other. middle_sees: there is one behind the last level too.
    latent: channels of the encoder's output. code_width: numbers of a code. tokens: the token of each code.
    """

    side: int
    first: int
    channels: tuple[int, ...]
    blocks: int
    seeing: tuple[int, ...]
    middle_sees: bool
    latent: int
    code_width: int
    tokens: tuple[int, ...]

    @property
    def patch(self) -> int:
        """The pixels along an axis of a patch."""
        return 1 << (len(self.channels) - 1)

    @property
    def residuals(self) -> Iterator[tuple[str, int, int, int]]:
        """The name, inputs, outputs and places of each residual block."""
        inputs = self.first
        for level, outputs in enumerate(self.channels):
            places = (self.patch >> level) ** 2
            for block in range(self.blocks):
                yield f"down.{level}.block.{block}", inputs, outputs, places
                inputs = outputs
        yield from ((f"mid.block_{number}", inputs, inputs, 1) for number in (1, 2))

    @property
    def views_seen(self) -> Iterator[Sees]:
        """The layers in which all places see each other."""
        for level in self.seeing:
            places = (self.patch >> level) ** 2
            yield from (
                Sees(f"down.{level}.attn.{block}", self.channels[level], places) for block in range(self.blocks)
            )
        if self.middle_sees:
            yield Sees("mid.attn_1", self.channels[-1], 1)

    @property
    def convolutions(self) -> Iterator[Convolution]:
        """All convolutions of the encoder and the one behind it, which is called quant_conv."""
        yield Convolution("conv_in", 3, self.first, 3, self.patch**2)
        for name, inputs, outputs, places in self.residuals:
            yield Convolution(f"{name}.conv1", inputs, outputs, 3, places)
            yield Convolution(f"{name}.conv2", outputs, outputs, 3, places)
            if inputs != outputs:
                yield Convolution(f"{name}.nin_shortcut", inputs, outputs, 1, places)
        for level, width in enumerate(self.channels[:-1]):
            yield Convolution(f"down.{level}.downsample.conv", width, width, 3, (self.patch >> (level + 1)) ** 2)
        for own in self.views_seen:
            yield from (
                Convolution(f"{own.name}.{part}", own.channels, own.channels, 1, own.places)
                for part in ("q", "k", "v", "proj_out")
            )
        yield Convolution("conv_out", self.channels[-1], self.latent, 3, 1)
        yield Convolution("quant_conv", self.latent, self.code_width, 1, 1)

    @property
    def group_norms(self) -> Iterator[tuple[str, int]]:
        """The name and channels of each norm."""
        for name, inputs, outputs, _ in self.residuals:
            yield from ((f"{name}.norm1", inputs), (f"{name}.norm2", outputs))
        yield from ((f"{own.name}.norm", own.channels) for own in self.views_seen)
        yield "norm_out", self.channels[-1]

    @property
    def patch_flops(self) -> int:
        seen = sum(2 * own.channels * own.places**2 * self.side**2 for own in self.views_seen)
        products = sum(each.weights * each.places for each in self.convolutions)
        return 2 * (products + seen + len(self.tokens) * self.code_width)

    @property
    def parameters(self) -> int:
        total = sum(each.weights + each.outputs for each in self.convolutions)
        return total + 2 * sum(width for _, width in self.group_norms) + len(self.tokens) * self.code_width

    def scratch(self) -> int:
        """Return the numbers per patch of the picture that runs that lie between two convolutions, at most."""
        widest = max(max(each[1:3]) * each[3] for each in self.residuals)
        return max(HELD * widest, 3 * len(self.tokens))


def flat(name: str) -> str:
    """Return a name of the files as that of a module, which has no dots."""
    return name.replace(".", "_")
