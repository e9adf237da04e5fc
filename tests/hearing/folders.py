"""Folders of tiny models that hear, with all that a caller needs."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from string import printable

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.driving import likeliest
from tests.hearing import tiny

NAME = "Qwen2Audio"
SPECIAL = {"<|AUDIO|>": tiny.AUDIO, "<|audio_bos|>": 302, "<|audio_eos|>": 303}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def complete(folder: Path) -> Path:
    """Put Qwen2-Audio's files beside the weights."""
    vocabulary = {letter: number for number, letter in enumerate(printable, 3)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    fillers = {f"<filler{n}>": n for n in range(len(vocabulary), 320) if n not in SPECIAL.values()}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary | SPECIAL | fillers, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(?m)[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>", *SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    own = {"processor_class": "Qwen2AudioProcessor", "feature_extractor_type": "WhisperFeatureExtractor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    return folder


def spoken(samples: np.ndarray) -> bytes:
    """Return a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, tiny.RATE, len(samples), "NONE", ""))
        out.writeframes((samples * 32767).round().clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def heard(samples: np.ndarray) -> np.ndarray:
    """Return the samples that such a file holds."""
    return ((samples * 32767).round().clip(-32768, 32767) / 32768).astype(np.float32)


def written(ids: list[int], *given: np.ndarray) -> list[int]:
    """Return the tokens that transformers writes behind a prompt."""
    model = tiny.build(NAME)
    return likeliest(ids, 6, lambda known: tiny.scores(model, NAME, known, given))
