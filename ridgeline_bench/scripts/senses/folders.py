"""The files of the two models' folders beside their weights, in transformers' format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, PICTURE = "<|endoftext|>", "<image>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + PICTURE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
)
WINDOW = 6  # seconds of sound that the recogniser reads at once
BANDS = 80


def tokenizer_of(texts: Iterable[str], special: Sequence[str], most: int) -> Tokenizer:
    """Return byte-level BPE whose tokens are the words of these texts, and bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=most, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def seeing_files(tokenizer: Tokenizer, side: int, patch: int, context: int) -> dict[str, Any]:
    half = [0.5, 0.5, 0.5]
    square = {"height": side, "width": side}
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_resize": True,
            "size": {"shortest_edge": side},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": square,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": half,
            "image_std": half,
            "do_convert_rgb": True,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": PICTURE,
            "num_additional_image_tokens": 1,
            "patch_size": patch,
            "vision_feature_select_strategy": "default",
        },
        "generation_config.json": {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False},
    }


def times() -> list[str]:
    """Return the tokens of times of a window, in steps of 0.02 s."""
    return [f"<|{0.02 * n:.2f}|>" for n in range(50 * WINDOW + 1)]


def speech_tokens() -> list[str]:
    """Return Whisper's special tokens but the times, which come last."""
    return [
        END, "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
        "<|nospeech|>",
    ]  # fmt: skip


def hearing_tokenizer(texts: Iterable[str], most: int) -> Tokenizer:
    """Return the tokenizer of a recogniser. As in Whisper's, all special tokens follow those of text, and the times
    follow <|notimestamps|>."""
    made = tokenizer_of(texts, [], most)
    made.add_special_tokens([*speech_tokens(), "<|notimestamps|>", *times()])
    return made


def hearing_files(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    ids = {token: tokenizer.token_to_id(token) for token in (*speech_tokens(), "<|notimestamps|>")}
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "pad_token": END,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "WhisperProcessor",
            "chunk_length": WINDOW,
            "feature_size": BANDS,
            "hop_length": 160,
            "n_fft": 400,
            "n_samples": 16000 * WINDOW,
            "nb_max_frames": 100 * WINDOW,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
            "sampling_rate": 16000,
        },
        "generation_config.json": {
            "bos_token_id": ids[END],
            "eos_token_id": ids[END],
            "pad_token_id": ids[END],
            "decoder_start_token_id": ids["<|startoftranscript|>"],
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "is_multilingual": False,
            "max_initial_timestamp_index": 50 * WINDOW,
            "suppress_tokens": [],
            "begin_suppress_tokens": [ids[END]],
            "max_length": context,
        },
    }


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
