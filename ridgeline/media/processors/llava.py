"""LLaVA-1.5: one square view, and a token for each patch of CLIP."""

from __future__ import annotations

from ridgeline.media.layout import Layout, Patching
from ridgeline.media.processors.files import ModelFiles, patching, square_box
from ridgeline.media.processors.pixtral import Pixtral
from ridgeline.media.processors.plain import CLIP, clip_view


class LlavaPictures:
    """With `do_pad` the picture is first put into a square of the mean color."""

    def __new__(cls, files: ModelFiles) -> LlavaPictures:
        if files.vision.get("model_type") == "pixtral":  # Pixtral's first release has LLaVA's name
            return Pixtral(files)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", str(files.processor.get("image_token", "<image>")))
        side = int(files.processor.get("patch_size") or files.vision.get("patch_size", 14))
        self.patching: Patching = patching(files.image, CLIP, side)
        class_token = int("siglip" not in str(files.vision.get("model_type", "clip_vision_model")))
        self._more = int(files.processor.get("num_additional_image_tokens", class_token))
        taken = files.processor.get("vision_feature_select_strategy") or files.config.get(
            "vision_feature_select_strategy", "default"
        )
        self._more -= taken == "default"

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        box, fill = None, (0, 0, 0)
        if self._files.image.get("do_pad") and height != width:
            red, green, blue = (int(255 * mean) for mean in self.patching.mean)
            box, fill = square_box(height, width), (red, green, blue)
        view = clip_view(self._files, height, width, box, fill=fill)
        rows, columns = view.window.rows // self.patching.rows, view.window.columns // self.patching.columns
        return self._files.layout([view], [rows * columns + self._more])
