"""Pictures that a caller of the offline API has in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.media.items import Clip, Item, Picture, Sound, picture
from ridgeline.text.arguments import short

KINDS = ("image",)
PARTS = ("image", "image_pil")  # of a message


def items_of(data: Any) -> list[Item]:
    """Return a prompt's `multi_modal_data` as items: {"image": one picture or a list of them}. Raise InvalidRequest."""
    if not isinstance(data, Mapping) or any(kind not in KINDS for kind in data):
        raise InvalidRequest(
            f"multi_modal_data is {{'image': a picture or a list of them}}, got {short(data)}.",
            param="multi_modal_data",
        )
    found = list[Item]()
    for given in data.values():
        found += map(item_of, given if isinstance(given, (list, tuple)) and not _is_item(given) else [given])
    return found


def item_of(value: Any) -> Item:
    """Return a PIL image, an array or a tensor [height, width, 3] of uint8, or an item as an item. Raise
    InvalidRequest."""
    if _is_item(value):
        item: Item = value
        return item
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # of PIL, which need not be there
        value = np.asarray(value.convert("RGB"))
    array = np.asarray(value)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or not array.size:
        raise InvalidRequest(
            f"a picture is a PIL image or an array [height, width, 3] of uint8, got {array.dtype} "
            f"{list(array.shape)}; convert it.",
            param="multi_modal_data",
        )
    return picture(array)


def with_items(messages: Sequence[Any]) -> tuple[Sequence[Any], list[Item]]:
    """Return messages with {"type": "image"} in place of parts that hold a picture, and these pictures: parts
    {"type": "image_pil", "image_pil": a picture} and {"type": "image", "image": a picture}. Raise InvalidRequest."""
    items = list[Item]()

    def part(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind not in PARTS or kind not in value:
            return value
        items.append(item_of(value[kind]))
        return {"type": "image"}

    def message(value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), list):
            return value
        return {**value, "content": [part(each) for each in value["content"]]}

    if not isinstance(messages, (list, tuple)):
        return messages, items  # the template says what is wrong
    return [message(each) for each in messages], items


def _is_item(value: object) -> bool:
    return isinstance(value, (Picture, Clip, Sound))
