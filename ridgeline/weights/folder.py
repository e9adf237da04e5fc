"""The place of a model: a folder, or a snapshot of the hub. This needs no torch, so that looking a model up stays
fast."""

from __future__ import annotations

import glob
from hashlib import blake2b
from pathlib import Path

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.settings.config import LLMConfig
from ridgeline.weights.formats.gguf_file import gguf_parts, is_gguf
from ridgeline.weights.formats.mistral_files import PARAMS, WEIGHTS
from ridgeline.weights.gguf_choice import chosen_gguf, tag_of, tagged_files
from ridgeline.weights.hub import fetched

ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED_MODEL = ASSETS / "embedded"
EMBEDDED_DRAFT = ASSETS / "embedded-draft"
EMBEDDED_EAGLE = ASSETS / "embedded-eagle"
EMBEDDED_SPEECH = ASSETS / "embedded-speech"
EMBEDDED_DRAFTS = {"draft_model": EMBEDDED_DRAFT, "eagle3": EMBEDDED_EAGLE}  # by the method of speculation

GENERATION_FILE = "generation_config.json"
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", WEIGHTS, f"{WEIGHTS}.index.json")
NO_DEFAULTS = ("none", "vllm")  # the second is vLLM's name for "the engine's own"
_READ = (".json", ".safetensors", ".gguf", ".bin", ".pt", ".pth")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "tiktoken.model", "merges.txt"]
_HUB_DUPLICATES = ["original/*", "consolidated*", "onnx/*", "*mmproj*"]  # the same weights in other layouts, or towers


def shipped_model(name: str) -> Path | None:
    """Return the folder of the model or adapter of that name that ships with Ridgeline, or None."""
    return next((asset for asset in ASSETS.iterdir() if asset.name == name), None)


def adapter_folder(folder: Path) -> Path:
    """Return an adapter's folder: itself if it exists, else the adapter of that name that ships with Ridgeline, else
    itself again, which a reader refuses."""
    return folder if folder.exists() else shipped_model(str(folder)) or folder


def fingerprint(*folders: Path) -> str:
    """Return a text that changes when a file of these models is replaced or written to."""
    files = [
        file for folder in folders for file in (sorted(folder.iterdir()) if folder.is_dir() else gguf_parts(folder))
    ]
    digest = blake2b(digest_size=16)
    for file in files:
        if file.suffix.lower() in _READ and file.is_file():
            facts = file.stat()
            digest.update(f"{file.name}\x1f{facts.st_ino}\x1f{facts.st_size}\x1f{facts.st_mtime_ns}\x1f".encode())
    return digest.hexdigest()


def resolve_model(
    model: str | Path, revision: str | None = None, download_dir: str | Path | None = None, *, weights: bool = True
) -> Path:
    """Return the folder or GGUF file of `model`: itself if it exists, else the model of that name that ships with
    Ridgeline, else the hub id's snapshot, downloaded into `download_dir` (default: the hub client's) if it is not
    there. Without `weights` only the other files are downloaded.

    A folder without safetensors may hold GGUF files. A tag behind the name chooses one: "owner/name:Q4_K_M". Without a
    tag there must be only one.

    Raise ModelLoadError if it is none of these, or a hub id that cannot be reached.
    """
    if not isinstance(model, str | Path):
        raise ModelLoadError(f"model {str(model)[:80]!r} is no path: it is of the type {type(model).__name__}.")
    text = str(model)
    if not text:
        raise ModelLoadError("no model was given; name a folder or a hub id.")
    if (found := _existing(Path(text), None)) is not None:
        return found
    name, tag = tag_of(text)
    if tag is not None and (found := _existing(Path(name), tag)) is not None:
        return found
    if is_gguf(Path(text)):
        raise ModelLoadError(f"the file {text!r} does not exist.")
    if (shipped := shipped_model(text)) is not None:
        return shipped
    from huggingface_hub import snapshot_download  # costs 0.3 s, and folders do not need it

    snapshot = fetched(
        name,
        snapshot_download,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=_HUB_FILES if tag is None else [*_HUB_FILES, *_tagged(name, tag, revision)],
        ignore_patterns=_HUB_DUPLICATES if weights and tag is None else [*_HUB_DUPLICATES, "*.safetensors"],
    )
    if weights and tag is None and (snapshot / PARAMS).exists() and not (snapshot / "config.json").exists():
        # Mistral's own form is all there is
        arguments = {"revision": revision, "cache_dir": download_dir, "allow_patterns": ["consolidated*.safetensors*"]}
        snapshot = fetched(name, snapshot_download, **arguments)
    return _in_folder(snapshot, tag, name)


def _tagged(name: str, tag: str, revision: str | None) -> list[str]:
    """Return patterns of the files with this tag, or none if the hub cannot be asked: then its copy on this machine is
    all there is. Raise ModelLoadError."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(name, revision=revision)
    except Exception:  # for which the download that follows has the same reason, and says it
        return []
    return [glob.escape(each) for each in tagged_files(names, tag, name)]


def _existing(model: Path, tag: str | None) -> Path | None:
    """Return the folder or GGUF file of a path, or None if it does not exist. Raise ModelLoadError if it is no model's
    path."""
    try:
        path = model.expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (TypeError, RuntimeError, OSError) as error:  # not a text, an unknown ~user, or a name too long
        raise ModelLoadError(f"model {str(model)[:80]!r} is no path: {error.args[-1]}.") from error
    if is_folder:
        return _in_folder(path, tag, str(path))
    if not exists:
        return None
    if not is_gguf(path) or tag is not None:
        raise ModelLoadError(
            f"model {str(model)!r} is a file; give the folder that holds config.json, or a .gguf file."
        )
    return path if path.is_file() else None


def _in_folder(folder: Path, tag: str | None, name: str) -> Path:
    """Return a folder, or the GGUF file in it that is meant. Raise ModelLoadError if none is, or several are."""
    has_others = any((folder / file).exists() for file in _SAFETENSORS)
    if tag is None and has_others:
        return folder
    if (found := chosen_gguf(folder, tag)) is not None:
        return found
    if tag is not None:
        raise ModelLoadError(f"{name} holds no GGUF file, so {tag!r} chooses nothing; leave it out.")
    return folder


def resolve_tokenizer(folder: Path, config: LLMConfig) -> Path:
    """Return the place of the tokenizer and the chat template: the model's `folder` unless another is configured. Raise
    ModelLoadError."""
    if config.tokenizer is None:
        return folder
    return resolve_model(config.tokenizer, config.tokenizer_revision, config.download_dir, weights=False)


def generation_file(folder: str | Path) -> Path:
    """Return a folder's generation_config.json. Raise InvalidConfig if there is none."""
    path = Path(folder).expanduser() / GENERATION_FILE
    if not path.is_file():
        raise InvalidConfig(
            f"generation_config is {str(folder)!r}, which is no folder with a {path.name}; use auto, none, or such a "
            "folder."
        )
    return path
