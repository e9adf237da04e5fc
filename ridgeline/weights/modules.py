"""The files that sentence-transformers keeps beside a model: which modules run, with which settings. This needs no
torch."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.pooling import Side
from ridgeline.models.pooling import DenseModule, Modules
from ridgeline.weights.formats.gguf_file import is_gguf, read_gguf
from ridgeline.weights.formats.json_file import bounded_text, read_json

PUNCTUATION = tuple(string.punctuation)

_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # llama.cpp's numbers
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def read_modules(folder: Path) -> Modules | None:
    """Return the modules of a folder, or None if it has none. Raise ModelLoadError for modules that do not run here. A
    GGUF file has a pooling if it says which, and its vectors are of length 1, as llama.cpp's are."""
    if is_gguf(folder):
        return _gguf_pooling(folder)
    listed = _listed(folder)
    if listed is None:
        return None
    pooling: Mapping[str, Any] | None = None
    splade: Mapping[str, Any] | None = None
    dense: list[DenseModule] = []
    normalize, longest, masks = False, None, False
    for kind, path in listed:
        if (kind == "Pooling" and pooling is not None) or (normalize and kind in ("Pooling", "Dense")):
            raise ModelLoadError(
                f"{folder} has the modules {', '.join(each for each, _ in listed)[:200]}; here one Pooling may stand "
                "before Dense modules, and Normalize behind them."
            )
        match kind:
            case "Transformer" | "MLMTransformer":
                if path not in ("", "."):
                    raise ModelLoadError(f"{folder} keeps its transformer in {path}; give that folder.")
                longest = _longest(folder)
            case "Pooling":
                pooling = read_json(folder / path / "config.json", required=True)
            case "Dense":
                dense.append(
                    DenseModule(prefix=f"{path}/", config=read_json(folder / path / "config.json", required=True))
                )
            case "Normalize":
                normalize = True
            case "MultiVectorMask":
                masks = True
            case "SpladePooling":
                splade = read_json(folder / path / "config.json", required=True)
            case "Dropout":
                pass
            case _:
                raise ModelLoadError(f"{folder} has a module of the kind {kind!r}, which does not run here.")
    late = pooling is None and (masks or bool(dense))
    return Modules(
        pooling=pooling, dense=tuple(dense), normalize=normalize, max_tokens=longest, late=late, splade=splade
    )


def _gguf_pooling(path: Path) -> Modules | None:
    values = read_gguf(path).values
    name = f"{values.get('general.architecture')}.pooling_type"
    number = values.get(name, 0)
    if isinstance(number, bool) or number not in (0, -1, *_GGUF_POOLINGS):
        what = "of a reranker" if number == 4 else "that we do not know"
        known = ", ".join(f"{each} ({mode})" for each, mode in _GGUF_POOLINGS.items())
        raise ModelLoadError(f"{path} sets {name} to {repr(number)[:80]}, a pooling {what}; as GGUF we run {known}.")
    return (
        Modules(pooling={"pooling_mode": _GGUF_POOLINGS[number]}, normalize=True) if number in _GGUF_POOLINGS else None
    )


def module_folders(folder: Path) -> list[str]:
    """Return the names of the folders with tensors of their own."""
    return [path for kind, path in _listed(folder) or () if kind == "Dense"]


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the texts that go before others by the name of their use, and the name of the one that goes before all if
    no other is named."""
    config = {} if is_gguf(folder) else read_json(folder / "config_sentence_transformers.json")
    prompts = config.get("prompts")
    found = (
        {str(name): text for name, text in prompts.items() if isinstance(text, str)}
        if isinstance(prompts, dict)
        else {}
    )
    default = config.get("default_prompt_name")
    return found, default if isinstance(default, str) and default in found else None


def read_sides(folder: Path) -> tuple[Side, Side]:
    """Return the form of queries and of documents for late interaction, which PyLate, sentence-transformers or the
    first ColBERT keep."""
    if is_gguf(folder):
        return Side(), Side()
    own, first = read_json(folder / "config_sentence_transformers.json"), read_json(folder / "artifact.metadata")
    lengths = {**transformer_settings(folder), **own}
    if first:
        skipped = PUNCTUATION if first.get("mask_punctuation", True) else ()
        query = Side(marker=_text(first.get("query_token_id")), most=_count(first.get("query_maxlen")))
        document = Side(marker=_text(first.get("doc_token_id")), most=_count(first.get("doc_maxlen")), skipped=skipped)
        return query, document
    return (
        Side(marker=_text(own.get("query_prefix")), most=_count(lengths.get("query_length"))),
        Side(
            marker=_text(own.get("document_prefix")),
            most=_count(lengths.get("document_length")),
            skipped=_skipped(folder, own),
        ),
    )


def _skipped(folder: Path, own: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words whose tokens do not count in documents. PyLate skips punctuation unless it says otherwise."""
    words = own.get("skiplist_words", PUNCTUATION if "query_prefix" in own else ())
    for kind, path in _listed(folder) or ():
        if kind == "MultiVectorMask":
            words = read_json(folder / path / "config.json").get("skiplist_words")
    return tuple(word for word in words if isinstance(word, str)) if isinstance(words, list | tuple) else ()


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def transformer_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that sentence-transformers keeps of its first module, in a file that is named after a family;
    {} without such a file."""
    if is_gguf(folder):
        return {}
    found = (read_json(folder / f"sentence_{family}_config.json") for family in _FAMILIES)
    return next(filter(None, found), {})


def lowers_case(folder: Path) -> bool:
    """Return True if small letters are made of a text before the tokenizer sees it: by sentence-transformers, or by the
    class of SigLIP's tokenizers, whose files do not say so."""
    if (folder / "modules.json").exists() and transformer_settings(folder).get("do_lower_case") is True:
        return True
    return read_json(folder / "config.json").get("model_type") == "siglip2" or drops_punctuation(folder)


def drops_punctuation(folder: Path) -> bool:
    """Return True if the class of a tokenizer takes punctuation out of texts: SigLIP's first one."""
    return read_json(folder / "tokenizer_config.json").get("tokenizer_class") == "SiglipTokenizer"


def cross_encoder(folder: Path) -> dict[str, Any]:
    """Return the settings that a cross-encoder keeps beside its config.json as entries of that file, where older ones
    have them: what makes probabilities of its scores."""
    function = read_json(folder / "config_sentence_transformers.json").get("activation_fn")
    return {} if function is None else {"sentence_transformers": {"activation_fn": function}}


def first_colbert(folder: Path) -> dict[str, Any]:
    """Return the settings that the first ColBERT keeps beside its config.json as entries of that file."""
    width = _count(read_json(folder / "artifact.metadata").get("dim"))
    return {} if width is None else {"colbert_dim": width}


def token_id(folder: Path, text: str) -> int | None:
    """Return the id of a token by its text, or None. text: or the name of an entry of tokenizer_config.json, whose
    token is meant."""
    named = read_json(folder / "tokenizer_config.json").get(text)
    if named is not None:
        content = named.get("content") if isinstance(named, dict) else named
        added = read_json(folder / "tokenizer.json").get("added_tokens")
        for each in added if isinstance(added, list) else ():
            if isinstance(each, dict) and each.get("content") == content and isinstance(each.get("id"), int):
                return int(each["id"])
        text = str(content)
    model = read_json(folder / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else read_json(folder / "vocab.json")
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return found if isinstance(found, int) else None


def _listed(folder: Path) -> list[tuple[str, str]] | None:
    """Return the kind and the place of each module in order, or None without any."""
    path = folder / "modules.json"
    if is_gguf(folder) or not path.exists():
        return None
    try:
        modules = json.loads(bounded_text(path))
        found = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); copy it again from the model's source.") from error
    for _, place in found:
        if place.startswith("/") or ".." in Path(place).parts:
            raise ModelLoadError(f"{path} names {place[:80]!r}, which lies outside of the model's folder.")
    return found


def _longest(folder: Path) -> int | None:
    """Return the tokens to which sentence-transformers cuts its inputs. Up to version 5.3 it writes `max_seq_length`
    beside its settings; later versions change the tokenizer's `model_max_length`, which all versions go by where
    nothing else is said."""
    settings, of_tokenizer = transformer_settings(folder), "model_max_length"
    for value in (
        _within(settings, "processing_kwargs", "text").get("max_length"),
        _within(settings, "processor_kwargs").get(of_tokenizer),
        _within(settings, "tokenizer_args").get(of_tokenizer),
        settings.get("max_seq_length"),
        read_json(folder / "tokenizer_config.json").get(of_tokenizer),
    ):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _within(settings: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the object of that name inside of others, or an empty one."""
    found: Any = settings
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
