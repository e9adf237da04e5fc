"""Pictures in prompts, by the rules in a model's own files: one file for each family of processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.registry import Registry
from ridgeline.media.layout import Encode, Processor
from ridgeline.media.processors.files import ModelFiles

# The files of a model's folder whose JSON is read
NAMES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
)

# The folder of a model's in which such a tokenizer lies
READERS = "qformer_tokenizer"

_HERE = "ridgeline.media.processors."

# `processor_class` of the files, or `model_type` of config.json
PROCESSORS = Registry(
    "picture processor",
    {
        "clip": _HERE + "plain:ClipPictures",
        "siglip": _HERE + "plain:Siglip",
        "siglip2": _HERE + "plain:Siglip2",
        "LlavaProcessor": _HERE + "llava:LlavaPictures",
        "llava": _HERE + "llava:LlavaPictures",
        "vipllava": _HERE + "llava:LlavaPictures",
        "LlavaNextProcessor": _HERE + "llava_onevision:LlavaNextTiles",
        "llava_next": _HERE + "llava_onevision:LlavaNextTiles",
        "LlavaOnevisionProcessor": _HERE + "llava_onevision:LlavaOnevision",
        "llava_onevision": _HERE + "llava_onevision:LlavaOnevision",
        "Qwen2VLProcessor": _HERE + "qwen:Qwen2VL",
        "Qwen2_5_VLProcessor": _HERE + "qwen:Qwen25VL",
        "Qwen3VLProcessor": _HERE + "qwen:Qwen3VL",
        "qwen2_vl": _HERE + "qwen:Qwen2VL",
        "qwen2_5_vl": _HERE + "qwen:Qwen25VL",
        "qwen3_vl": _HERE + "qwen:Qwen3VL",
        "qwen3_vl_moe": _HERE + "qwen:Qwen3VL",
        "qwen3_5": _HERE + "qwen:Qwen3VL",
        "qwen3_5_moe": _HERE + "qwen:Qwen3VL",
        "Qwen2AudioProcessor": _HERE + "sounds:Qwen2Audio",
        "qwen2_audio": _HERE + "sounds:Qwen2Audio",
        "Qwen2_5OmniProcessor": _HERE + "sounds:Qwen2_5Omni",
        "qwen2_5_omni": _HERE + "sounds:Qwen2_5Omni",
        "qwen2_5_omni_thinker": _HERE + "sounds:Qwen2_5Omni",
        "Qwen3OmniMoeProcessor": _HERE + "sounds:Qwen3Omni",
        "qwen3_omni_moe": _HERE + "sounds:Qwen3Omni",
        "qwen3_omni_moe_thinker": _HERE + "sounds:Qwen3Omni",
        "Glm4vProcessor": _HERE + "glm:Glm4v",
        "glm4v": _HERE + "glm:Glm4v",
        "glm4v_moe": _HERE + "glm:Glm4v",
        "paddleocr_vl": _HERE + "paddle:PaddleOCR",
        "PaddleOCRVLProcessor": _HERE + "paddle:PaddleOCR",
        "kimi_vl": _HERE + "kimi:KimiVL",
        "KimiVLProcessor": _HERE + "kimi:KimiVL",
        "kimi_k25": _HERE + "kimi:KimiK25",
        "Kimi_K25Processor": _HERE + "kimi:KimiK25",
        "Gemma3Processor": _HERE + "gemma3:Gemma3Pictures",
        "gemma3": _HERE + "gemma3:Gemma3Pictures",
        "Gemma4Processor": _HERE + "gemma4:gemma4",
        "gemma4": _HERE + "gemma4:gemma4",
        "Gemma3nProcessor": _HERE + "sounds:Gemma3nSounds",
        "gemma3n": _HERE + "sounds:Gemma3nSounds",
        "PaliGemmaProcessor": _HERE + "plain:PaliGemma",
        "paligemma": _HERE + "plain:PaliGemma",
        "InternVLProcessor": _HERE + "internvl:InternVL",
        "internvl": _HERE + "internvl:InternVL",
        "PixtralProcessor": _HERE + "pixtral:Pixtral",
        "pixtral": _HERE + "pixtral:Pixtral",
        "mistral3": _HERE + "pixtral:Pixtral",
        "Idefics3Processor": _HERE + "idefics3:Idefics3",
        "idefics3": _HERE + "idefics3:Idefics3",
        "SmolVLMProcessor": _HERE + "idefics3:Idefics3",
        "smolvlm": _HERE + "idefics3:Idefics3",
        "MllamaProcessor": _HERE + "mllama:Mllama",
        "mllama": _HERE + "mllama:Mllama",
        "ChameleonProcessor": _HERE + "chameleon:ChameleonPictures",
        "chameleon": _HERE + "chameleon:ChameleonPictures",
        "Blip2Processor": _HERE + "blip:BlipPictures",
        "blip-2": _HERE + "blip:BlipPictures",
        "InstructBlipProcessor": _HERE + "blip:InstructBlipPictures",
        "instructblip": _HERE + "blip:InstructBlipPictures",
        "MiniCPMV4_6Processor": _HERE + "minicpm:MiniCPM",
        "minicpmv4_6": _HERE + "minicpm:MiniCPM",
        "Phi4MultimodalProcessor": _HERE + "phi4:Phi4",
        "phi4_multimodal": _HERE + "phi4:Phi4",
        "DeepseekVLV2Processor": _HERE + "deepseek_ocr:DeepseekOcr",
        "deepseek_vl_v2": _HERE + "deepseek_ocr:DeepseekOcr",
        "DeepseekOcr2Processor": _HERE + "deepseek_ocr:DeepseekOcr2",
        "deepseek_ocr2": _HERE + "deepseek_ocr:DeepseekOcr2",
    },
)


def processor_of(
    files: Mapping[str, Mapping[str, Any]],
    encode: Encode,
    options: Mapping[str, Any] | None = None,
    read: Encode | None = None,
) -> Processor:
    """Return the processor that a model's files describe.

    files: the JSON of those of `NAMES` that the folder has, by name.
    encode: text with special tokens to ids, without tokens before or behind.
    options: settings of a request that replace those of the files, such as `max_pixels`.
    read: text with special tokens to ids by the tokenizer of a tower that reads prompts (`READERS`).

    Raise InvalidConfig where no file names a processor that is known here.
    """
    found = ModelFiles(files, encode, options or {}, read)
    named = [found.processor_class, str(found.config.get("model_type", ""))]
    known = [name for name in named if name in PROCESSORS]
    if not known:
        raise InvalidConfig(
            f"no processor of pictures is known for processor_class {named[0]!r} and model_type {named[1]!r}; "
            f"known: {', '.join(PROCESSORS)}."
        )
    return PROCESSORS[known[0]](found)
