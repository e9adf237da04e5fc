"""The files that a processor is made of, and what processors share: sizes, and numbers of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.kernels.pictures.views import FILTERS, Box
from ridgeline.media.layout import Encode, Layout, Patching, Piece, View, token_ids

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # PIL's numbers
LONGEST_SHAPE = 200  # times as long as wide, as in the processors of Qwen
LONGEST_SQUARE = 1 << 14  # pixels a side of a square around a picture, which a CPU has in memory


@dataclass(frozen=True)
class ModelFiles:
    """json: the contents by name. encode: text to ids. options: what a request sets instead. read: text to ids by the
    tokenizer of a tower that reads prompts; None: there is none."""

    json: Mapping[str, Mapping[str, Any]]
    encode: Encode
    options: Mapping[str, Any] = field(default_factory=dict)
    read: Encode | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        return self.json.get("config.json", {})

    @property
    def vision(self) -> Mapping[str, Any]:
        """The tower's part of config.json."""
        return self.config.get("vision_config") or {}

    @property
    def processor(self) -> Mapping[str, Any]:
        return self.json.get("processor_config.json", {})

    @cached_property
    def image(self) -> Mapping[str, Any]:
        """The settings of pictures, with those of the request."""
        own = self.processor.get("image_processor") or self.json.get("preprocessor_config.json", {})
        return {**{name: value for name, value in own.items() if value is not None}, **self.options}

    @cached_property
    def heard(self) -> Mapping[str, Any]:
        """The settings of sounds."""
        own = self.processor.get("feature_extractor") or self.processor.get("audio_processor")
        own = own or self.json.get("preprocessor_config.json", {})
        return {name: value for name, value in own.items() if value is not None}

    @cached_property
    def clip(self) -> Mapping[str, Any]:
        """The settings of videos: those of pictures where no file has others."""
        own = self.json.get("video_preprocessor_config.json") or self.processor.get("video_processor")
        if not own:
            return self.image
        found = {name: value for name, value in own.items() if value is not None}
        if "fps" in self.options:
            found.pop("num_frames", None)
        return found | dict(self.options)

    @property
    def video_rate(self) -> float:
        """The frames a second of a video that are seen."""
        return float(self.clip.get("fps", 2.0))

    def samples(self, default: bool) -> bool:
        """Return True if frames are chosen of videos that are in memory."""
        return bool(self.clip.get("do_sample_frames", default))

    @property
    def processor_class(self) -> str:
        for name in ("processor_config.json", "preprocessor_config.json"):
            if found := self.json.get(name, {}).get("processor_class"):
                return str(found)
        return ""

    def token(self, name: str, default: str) -> str:
        """Return the text of a special token that tokenizer_config.json may name."""
        read = self.json.get("tokenizer_config.json", {})
        found = read.get(name) or (read.get("extra_special_tokens") or {}).get(name) or default
        return str(found["content"] if isinstance(found, Mapping) else found)

    def layout(self, views: Sequence[View], pieces: Sequence[Piece], **more: Any) -> Layout:
        return Layout(tuple(views), tuple(pieces), token_ids(pieces, self.encode), **more)


def patching(settings: Mapping[str, Any], defaults: Mapping[str, Any], side: int, **more: Any) -> Patching:
    """Return the numbers of patches of `side`, by settings or else defaults: `resample`, `image_mean`, `image_std`."""
    if settings.get("do_resize") is False:
        raise InvalidConfig("do_resize is false in the model's preprocessor files; pictures are always resized here.")
    resample = settings.get("resample", defaults["resample"])
    if resample not in FILTERS:
        raise InvalidConfig(f"resample is {resample!r}; known: {', '.join(map(str, FILTERS))}.")
    scaled = settings.get("do_rescale", True)
    normal = settings.get("do_normalize", defaults.get("do_normalize", True))
    return Patching(
        FILTERS[resample],
        float(settings.get("rescale_factor", 1 / 255)) if scaled else 1.0,
        _three(settings.get("image_mean", defaults["image_mean"])) if normal else (0.0, 0.0, 0.0),
        _three(settings.get("image_std", defaults["image_std"])) if normal else (1.0, 1.0, 1.0),
        side,
        side,
        **more,
    )


def _three(value: float | Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = (value,) * 3 if isinstance(value, int | float) else value
    return float(red), float(green), float(blue)


def check_spectra(settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise InvalidConfig if a model's files ask for other spectra of sounds than those that the encoder reads."""
    for name, value in wanted.items():
        if (found := settings.get(name, value)) != value:
            raise InvalidConfig(
                f"{name} is {str(found)[:80]} in the model's preprocessor files; sounds of this family are read with "
                f"{value} here."
            )


def whole(height: int, width: int, **more: Any) -> View:
    """Return the view of a whole picture, resized."""
    return View(height, width, Box(0, 0, height, width), **more)


def tiles(height: int, width: int, rows: int, columns: int, **more: Any) -> list[View]:
    """Return the tiles of rows x columns into which a picture of that size is cut, line by line."""
    return [
        View(height, width, Box(top, left, rows, columns), **more)
        for top in range(0, height, rows)
        for left in range(0, width, columns)
    ]


def square(size: Mapping[str, Any] | int) -> tuple[int, int]:
    """Return (height, width) of a size in the forms that the files have."""
    if isinstance(size, int):
        return size, size
    if "height" in size:
        return int(size["height"]), int(size["width"])
    edge = int(size.get("shortest_edge") or size["longest_edge"])
    return edge, edge


def shortest_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return the size at which the shorter side has `edge` pixels. Raise InvalidRequest for a picture that would become
    too long: of one line of 65,536 pixels the tables of that resize are gigabytes."""
    refuse_long(height, width)
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def resized(height: int, width: int, size: Mapping[str, Any] | int) -> tuple[int, int]:
    """Return the size of a picture that is resized to `size`: of its shorter side, or of both."""
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return shortest_edge(height, width, int(size["shortest_edge"]))
    return square(size)


def canvas(height: int, width: int, tile: tuple[int, int], fewest: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) of the tiles, `fewest` to `most` of them, whose shape is nearest to the picture's.

    Of equal ones the later counts, which has more tiles, if the picture has more than half of its pixels.
    """
    shapes = [(c, r) for c in range(1, most + 1) for r in range(1, most // c + 1) if fewest <= c * r]
    best, found = float("inf"), (1, 1)
    for columns, rows in sorted(shapes, key=lambda each: each[0] * each[1]):
        apart = abs(width / height - columns / rows)
        if apart < best:
            best, found = apart, (rows, columns)
        elif apart == best and height * width > 0.5 * tile[0] * tile[1] * columns * rows:
            found = (rows, columns)
    return found


def square_box(height: int, width: int) -> Box:
    """Return the smallest square around a picture, which lies in its middle. Raise InvalidRequest for a long picture,
    beside which the square is much larger."""
    refuse_long(height, width)
    if (side := max(height, width)) > LONGEST_SQUARE:
        raise refuse(height, width, f"is longer than {LONGEST_SQUARE} pixels")
    return Box(-((side - height) // 2), -((side - width) // 2), side, side)


def refuse_long(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > LONGEST_SHAPE:
        raise refuse(height, width, f"is more than {LONGEST_SHAPE} times as long as wide")


def refuse(height: int, width: int, why: str) -> InvalidRequest:
    return InvalidRequest(f"a picture of {width}x{height} pixels {why}; resize or crop it.", param="messages")
