"""A server's description of itself, asked for before any work."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import InvalidConfig

TIMEOUT = 20.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server. `engine` is "ridgeline", "vllm", …: the owner of the model by the server's words.

    `max_model_len` (prompt and answer together) and `vocab_size` are 0 if the server does not say.
    """

    url: str
    model: str
    engine: str = "unknown"
    version: str = ""
    max_model_len: int = 0
    vocab_size: int = 0

    @classmethod
    def ask(cls, url: str, headers: dict[str, str], model: str = "", *, kserve: bool = False) -> Server:
        """Ask a server about one of its models, or the first if none is named. Over KServe's protocol, which lists no
        models, one must be named. Raise InvalidConfig if it cannot be reached."""
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise InvalidConfig(f"--url must begin with http:// or https://, got {url!r}.")
        if kserve:
            if not model:
                raise InvalidConfig("--endpoint generate needs the model's name; give --model.")
            _get(f"{url}/v2/models/{model}", headers)
            known = _get(f"{url}/v2", headers)
            return cls(url=url, model=model, engine=str(known.get("name")), version=str(known.get("version", "")))
        models = _get(f"{url}/v1/models", headers).get("data", [])
        found = next((m for m in models if not model or m.get("id") == model), None)
        if found is None:
            names = ", ".join(str(m.get("id")) for m in models) or "none"
            raise InvalidConfig(f"{url} does not serve {model!r}; its models: {names}.")
        told = {}
        for route in ("/version", "/tokenizer_info"):  # not every server has these
            try:
                told[route] = _get(url + route, headers)
            except InvalidConfig:
                told[route] = {}
        return cls(
            url=url,
            model=found["id"],
            engine=str(found.get("owned_by") or "unknown"),
            version=str(told["/version"].get("version", "")),
            max_model_len=int(found.get("max_model_len") or 0),
            vocab_size=int(told["/tokenizer_info"].get("vocab_size") or 0),
        )


def _get(url: str, headers: dict[str, str]) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        hint = "; give its key with --api-key" if error.code in (401, 403) else ""
        raise InvalidConfig(f"{url} answers HTTP {error.code}{hint}.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InvalidConfig(f"{url} cannot be asked ({reason}); is the server up?") from error
    return found if isinstance(found, dict) else {}
