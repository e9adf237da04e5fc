"""BLIP-2 and InstructBLIP: a square of fixed size, of which learned queries make as many vectors."""

from __future__ import annotations

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.media.layout import Layout, Patching
from ridgeline.media.processors.files import ModelFiles, patching, resized, whole
from ridgeline.media.processors.plain import CLIP


class BlipPictures:
    """The picture is resized to a square, whatever its shape."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<image>")
        self._size = files.image.get("size", {"height": 384, "width": 384})
        self._queries = int(files.config.get("num_query_tokens") or 32)
        self.patching: Patching = patching(files.image, CLIP, int(files.vision.get("patch_size", 14)))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        view = whole(*resized(height, width, self._size))
        return self._files.layout([view], [self._queries], order=tuple(range(self._queries)))


class InstructBlipPictures(BlipPictures):
    """The same, where the queries read the prompt's text too, by a tokenizer of their own."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        if files.read is None:
            raise InvalidConfig("the model's folder has no qformer_tokenizer, by which its tower reads prompts.")
        self._encode = files.read
        own = files.config.get("qformer_config") or {}
        self._words = int(own.get("vocab_size", 30522))
        self._places = int(own.get("max_position_embeddings", 512))

    def read(self, text: str) -> tuple[int, ...]:
        found = tuple(self._encode(text))
        if len(found) > self._places:
            raise InvalidRequest(
                f"the prompt's text has {len(found)} tokens of the tower's tokenizer, which reads {self._places} at "
                "most beside a picture; shorten it.",
                param="prompt",
            )
        if max(found, default=0) >= self._words:
            raise InvalidRequest(
                f"the tower's tokenizer makes the token {max(found)} of the prompt, and its table has {self._words}.",
                param="prompt",
            )
        return found
