"""Folders of tiny models with all that a caller needs: a tokenizer of letters, a processor's files, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from string import printable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.vision import tiny
from tests.vision.families.family import IMAGE, VOCAB

MARKERS = {"llava": "<image>", "qwen2_vl": "<|image_pad|>", "qwen2_5_vl": "<|image_pad|>", "qwen3_vl": "<|image_pad|>"}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARKER{% elif part.type == 'video' %}VIDEO"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def backend(family: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of letters, and of the special tokens of a family's pictures."""
    vocabulary = {letter: number for number, letter in enumerate(printable, 3)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    special = {MARKERS[family]: IMAGE}
    if family != "llava":
        special |= {"<|video_pad|>": 301, "<|vision_start|>": 302, "<|vision_end|>": 303}
    fillers = {f"<filler{n}>": n for n in range(len(vocabulary), VOCAB) if n not in special.values()}
    found = tokenizers.Tokenizer(models.WordLevel(vocabulary | special | fillers, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(?m)[\\s\\S]"), "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens(["<s>", "</s>", *special])
    return found


def complete(family: str, folder: Path) -> Path:
    """Put the files beside the weights."""
    backend(family).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    template = TEMPLATE.replace("MARKER", MARKERS[family] + ("\n" if family == "llava" else ""))
    if family != "llava":
        template = template.replace(MARKERS[family], f"<|vision_start|>{MARKERS[family]}<|vision_end|>")
        template = template.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    how = tiny.FAMILIES[family].patching
    image = {"image_mean": how.mean, "image_std": how.std, "rescale_factor": how.scale, "resample": 3}
    if family == "llava":
        image |= {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "do_center_crop": True}
        own = {"processor_class": "LlavaProcessor", "patch_size": 7, "vision_feature_select_strategy": "default"}
        (folder / "processor_config.json").write_text(json.dumps({**own, "num_additional_image_tokens": 1}))
        image |= {"image_processor_type": "CLIPImageProcessor"}
    else:
        image |= {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 4096}
        names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
        image |= {"processor_class": f"{names[family]}Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    return folder
