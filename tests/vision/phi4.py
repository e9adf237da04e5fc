"""Phi-4-multimodal's processor of pictures, of transformers' source, without torchvision: PIL resizes here."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import BatchFeature

from tests.media.test_processors import taken

PATH, OWNER = "phi4_multimodal/image_processing_phi4_multimodal.py", "Phi4MultimodalImageProcessor"


def resize(image: Tensor, size: Sequence[int]) -> Tensor:
    """Return uint8 [3, height, width], resized as torchvision does by default: bilinearly, with antialiasing."""
    made = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(made)).permute(2, 0, 1)


def pad(image: Tensor, around: Sequence[int], fill: Sequence[int]) -> Tensor:
    assert len({*fill}) == 1
    left, top, right, bottom = around
    return F.pad(image, (left, right, top, bottom), value=fill[0])


class Phi4Pictures:
    """size, patch_size, dynamic_hd: as in preprocessor_config.json."""

    def __init__(self, size: dict[str, int], patch_size: int, dynamic_hd: int) -> None:
        self._size, self._side, self._most = SimpleNamespace(**size), patch_size, dynamic_hd
        own: dict[str, Any] = {
            "tvF": SimpleNamespace(resize=resize, pad=pad),
            "torch": torch,
            "BatchFeature": BatchFeature,
        }
        methods = ("find_closest_aspect_ratio", "dynamic_preprocess", "pad_to_max_num_crops",
                   "pad_mask_to_max_num_crops")  # fmt: skip
        for name in methods:
            setattr(self, name, taken(PATH, name, owner=OWNER, **own).__get__(self))
        self._whole = taken(PATH, "_preprocess", owner=OWNER, **own)

    def rescale_and_normalize(self, image: Tensor, *given: Any) -> Tensor:
        return (image.float() * (1 / 255) - 0.5) / 0.5

    def resize(self, image: Tensor, size: Any, resample: Any, antialias: bool) -> Tensor:
        assert not antialias
        return F.interpolate(image[None], (size.height, size.width), mode="bicubic", align_corners=False)[0]

    def __call__(self, pictures: Sequence[np.ndarray], **given: Any) -> Any:
        images = [torch.from_numpy(each).permute(2, 0, 1) for each in pictures]
        none = dict.fromkeys(("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean",
                              "image_std"))  # fmt: skip
        return self._whole(self, images, size=self._size, patch_size=self._side, dynamic_hd=self._most,
                           return_tensors="pt", **none)  # fmt: skip
