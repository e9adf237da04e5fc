"""The place of a model: a folder, or a snapshot of the hub. This needs no torch, so that looking a model up stays
fast."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.settings.config import LLMConfig
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.hub import fetched

ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED_MODEL = ASSETS / "embedded"
EMBEDDED_DRAFT = ASSETS / "embedded-draft"
EMBEDDED_EAGLE = ASSETS / "embedded-eagle"
EMBEDDED_DRAFTS = {"draft_model": EMBEDDED_DRAFT, "eagle3": EMBEDDED_EAGLE}  # by the method of speculation

GENERATION_FILE = "generation_config.json"
NO_DEFAULTS = ("none", "vllm")  # the second is vLLM's name for "the engine's own"
_READ = (".json", ".safetensors", ".gguf", ".bin", ".pt", ".pth")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "tiktoken.model", "merges.txt"]
_HUB_DUPLICATES = ["original/*", "consolidated*", "onnx/*"]  # the same weights again in other layouts


def shipped_model(name: str) -> Path | None:
    """Return the folder of the model of that name that ships with Ridgeline, or None."""
    return next((asset for asset in ASSETS.iterdir() if asset.name == name), None)


def fingerprint(*folders: Path) -> str:
    """Return a text that changes when a file of these models is replaced or written to."""
    files = [file for folder in folders for file in (sorted(folder.iterdir()) if folder.is_dir() else [folder])]
    digest = blake2b(digest_size=16)
    for file in files:
        if file.suffix in _READ and file.is_file():
            facts = file.stat()
            digest.update(f"{file.name}\x1f{facts.st_ino}\x1f{facts.st_size}\x1f{facts.st_mtime_ns}\x1f".encode())
    return digest.hexdigest()


def resolve_model(
    model: str | Path, revision: str | None = None, download_dir: str | Path | None = None, *, weights: bool = True
) -> Path:
    """Return the folder or GGUF file of `model`: itself if it exists, else the model of that name that ships with
    Ridgeline, else the hub id's snapshot, downloaded into `download_dir` (default: the hub client's) if it is not
    there. Without `weights` only the other files are downloaded.

    Raise ModelLoadError if it is none of these, or a hub id that cannot be reached.
    """
    if not str(model):
        raise ModelLoadError("no model was given; name a folder or a hub id.")
    try:
        folder = Path(model).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (TypeError, RuntimeError, OSError) as error:  # not a text, an unknown ~user, or a name too long
        raise ModelLoadError(f"model {str(model)[:80]!r} is no path: {error.args[-1]}.") from error
    if is_folder or (exists and is_gguf(folder)):
        return folder
    if exists:
        raise ModelLoadError(
            f"model {str(model)!r} is a file; give the folder that holds config.json, or a .gguf file."
        )
    if is_gguf(folder):
        raise ModelLoadError(f"the file {str(model)!r} does not exist.")
    if (shipped := shipped_model(str(model))) is not None:
        return shipped
    from huggingface_hub import snapshot_download  # costs 0.3 s, and folders do not need it

    return fetched(
        str(model),
        snapshot_download,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=_HUB_FILES,
        ignore_patterns=_HUB_DUPLICATES if weights else [*_HUB_DUPLICATES, "*.safetensors"],
    )


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
