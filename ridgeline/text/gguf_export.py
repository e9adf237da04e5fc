"""A GGUF file's tokenizer and chat templates as the files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.text.gguf_tokenizer import gguf_templates
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.formats.gguf_file import read_gguf


def write_texts(source: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates of a GGUF file to a folder."""
    tokenizer = Tokenizer.from_folder(source)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = json.dumps({**settings, **tokenizer.special_tokens}, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    for name, text in gguf_templates(read_gguf(source)).items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{Path(name).name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
