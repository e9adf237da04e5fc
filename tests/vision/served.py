"""A tiny vision-language model with all files that a server reads: tokenizer, chat template, processor."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.vision import tiny

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}:{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def complete(folder: Path) -> Path:
    """Put the files beside the weights of `tiny`'s LLaVA. Bytes have the ids from 3 on."""
    specials = ["<pad>", "<s>", "</s>"]
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*specials, *letters])}
    vocabulary |= {f"<unused{index}>": index for index in range(len(vocabulary), tiny.IMAGE)}
    vocabulary["<image>"] = tiny.IMAGE
    vocabulary |= {f"<unused{index}>": index for index in range(tiny.IMAGE + 1, tiny.VOCAB)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*specials, "<image>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1, "image_token": "<image>",
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28}, "do_resize": True, "do_center_crop": True, "do_rescale": True,
            "do_normalize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255, "resample": 3,
            "image_mean": list(tiny.MEAN), "image_std": list(tiny.STD),
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
