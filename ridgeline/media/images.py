"""A picture's file, decoded by Pillow, within bounds. It runs in a sealed process (`media.decoding`).

Plugins are called by their classes, so no other one can be chosen by a file's content, and `Image.open` is never used.
A picture becomes what transformers' `load_image` makes of it: turned by EXIF, then RGB. Beyond that, transparency is
laid on a background (white, as vLLM does with RGBA), and 16 bits keep their upper 8. Of an animation the first frame is
taken.

Legend:
    H  rows of pixels
    W  pixels in a row
    C  red, green, blue
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from errno import ENOMEM
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from ridgeline.media.bounds import PICTURES, BadMedia, MediaBounds, MemoryTaken, form_of

TURBO = find_spec("simplejpeg") is not None  # without it Pillow decodes JPEG files, to the same pixels
if TURBO:
    import simplejpeg

STRIP = 1 << 16  # pixels that are copied at a time: they stay in the cache of a core
KEPT = 4  # blocks of 16 MiB that Pillow keeps for the next picture: fresh memory takes as long as decoding
WHITE = (255, 255, 255)
ORIENTATION = 0x0112  # in EXIF
# 1 to 4 channels of 8 bits, one of 16 in either order, and one of 32 of which files of 16 bits use the lower half
DIRECT, DEEP = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB", "HSV"), ("I;16", "I;16L", "I;16B", "I;16N", "I")
OPENERS: dict[str, Callable[[Any], Image.Image]] = {
    "jpeg": JpegImagePlugin.jpeg_factory,
    "png": PngImagePlugin.PngImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "bmp": BmpImagePlugin.BmpImageFile,
    "tiff": TiffImagePlugin.TiffImageFile,
}
assert (
    MpoImagePlugin is not None
)  # of cameras' JPEG files; Pillow imports it once it sees one, and then no file is open
ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.core.set_blocks_max(KEPT)  # type: ignore[attr-defined]

Room = Callable[[Sequence[int]], np.ndarray]  # uint8, of this shape


def decode(data: Any, bounds: MediaBounds, room: Room, background: Sequence[int] = WHITE) -> np.ndarray:
    """Return pixels_HWC: uint8, in memory that `room` gave. Raise BadMedia."""
    form = form_of(data, "picture")
    try:
        image = OPENERS[form](BytesIO(data))
        _check_size(image.size, bounds)
        if form == "jpeg" and TURBO and _is_direct(image):
            width, height = image.size
            pixels_HWC = room((height, width, 3))
            if _decode_into(pixels_HWC, data):
                return pixels_HWC
            room = lambda shape: pixels_HWC  # noqa: E731  # there is memory for one picture
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies pictures that need no turn, too
        return _fill(_plain(image, tuple(background)), room)
    except (BadMedia, MemoryTaken, MemoryError):
        raise
    except Exception as error:  # plugins raise whatever the bytes led to
        if isinstance(error, OSError) and error.errno == ENOMEM:  # as some libraries tell it
            raise MemoryError from None
        raise BadMedia(f"the picture cannot be read as {PICTURES[form]} ({_words(error)}); send it anew.") from None


def _check_size(size: tuple[int, int], bounds: MediaBounds) -> None:
    width, height = size
    if width <= 0 or height <= 0:
        raise BadMedia(f"the picture has {width} by {height} pixels; send one that has at least one.")
    if width * height > bounds.pixels or max(size) > bounds.side:
        raise BadMedia(
            f"the picture has {width} by {height} pixels, of at most {bounds.pixels} and {bounds.side} a side; send a "
            "smaller one."
        )


def _plain(image: Image.Image, background: tuple[int, ...]) -> Image.Image:
    """Return the picture as RGB, or as L or RGB that `_fill` brings there."""
    if image.mode in DEEP:
        deep = np.asarray(image).astype(np.int64, copy=False)
        if image.mode == "I" and deep.size and (deep.min() < 0 or deep.max() > 0xFFFF):
            raise BadMedia("the picture has 32 bits a pixel, which is not taken; send one of 8 or 16 bits.")
        return Image.fromarray((deep >> 8).astype(np.uint8))
    if image.has_transparency_data:
        flat = Image.new("RGB", image.size, background)
        above = image if image.mode in ("RGBA", "LA") else image.convert("RGBA")
        flat.paste(above.convert("RGB"), mask=above.getchannel("A"))
        return flat
    if image.mode not in DIRECT and image.mode != "RGBX":
        raise BadMedia(f"the picture has pixels of the kind {image.mode}, which is not taken; send one in RGB.")
    return image if image.mode in ("RGB", "L") else image.convert("RGB")


def _is_direct(image: Image.Image) -> bool:
    """Return True for a JPEG file whose pixels are what they will be: it is not turned, and in gray or colors."""
    return image.mode in ("RGB", "L") and image.getexif().get(ORIENTATION, 1) == 1


def _decode_into(pixels_HWC: np.ndarray, data: Any) -> bool:
    """Decode a JPEG file by libjpeg-turbo where its pixels go, without Pillow's own memory between. Return False for a
    file that it would have to guess about: Pillow decides what becomes of these."""
    try:
        return bool(simplejpeg.decode_jpeg(data, "RGB", buffer=pixels_HWC).shape == pixels_HWC.shape)
    except ValueError:
        return False


def _fill(image: Image.Image, room: Room) -> np.ndarray:
    """Return the pixels, copied in strips: in one piece the copy would be there twice."""
    width, height = image.size
    pixels_HWC, rows = room((height, width, 3)), max(1, STRIP // width)
    for top in range(0, height, rows):
        strip = np.asarray(image.crop((0, top, width, min(top + rows, height))))
        pixels_HWC[top : top + rows] = strip if strip.ndim == 3 else strip[:, :, None]
    return pixels_HWC


def _words(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words[:100].rstrip(".") or type(error).__name__
