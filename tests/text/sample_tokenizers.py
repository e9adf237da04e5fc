"""Small tokenizers of the families that matter, trained here, and folders that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Größe, naïve café, Привет мир, 你好世界, こんにちは, 안녕하세요 👋🏽 🎉",
    "<html><body>hello world</body></html> 1234567890 ...",
] * 20

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def bos_first(backend: tokenizers.Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen spell text: every byte is a visible character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIALS)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False), "é!"])
    backend.post_processor = bos_first(backend)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral spell text: "▁" for a space, and <0x..> for the bytes of unknown characters."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(pieces)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIALS, show_progress=False)
    backend.train_from_iterator(CORPUS[:2] * 20, trainer)
    spec = json.loads(backend.to_str())
    vocab = spec["model"]["vocab"]
    for token in byte_tokens:
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.post_processor = bos_first(backend)
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As T5 spells text: "▁" for a space, the first one dropped."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS))
    return backend


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
}

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
