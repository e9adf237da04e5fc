"""A real model that says what a script says: a Mistral whose head is a table from each token to the next.

Each piece of the script is a token of its own. The template counts the answers so far and ends the prompt with the
token of the next turn, from which the table leads through the pieces of that turn to the end of the answer. Attention
and feed-forwards have weights of zero, so nothing else in the prompt matters. All else is as in any model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.weights.folder import EMBEDDED_MODEL

HIDDEN, INNER, HEAD, WINDOW = 256, 16, 16, 64
LONGEST = 262_144  # tokens: as many as agents expect
PIECE = 6  # characters, or more where a piece of this text is taken
END = "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}A call is <tool_call>{"name": "…", "arguments": {…}}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- set said = messages | selectattr("role", "equalto", "assistant") | list | length %}
{%- if tools %}<|turn_{{ [said, LAST_TURN] | min }}|>
{%- else %}<|plain_{{ [said, LAST_PLAIN] | min }}|>
{%- endif %}"""


def call(tool: str, **arguments: object) -> str:
    """Return a call of a tool as the model writes it."""
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


def save(
    folder: Path, turns: Sequence[str], plain: Sequence[str] = ("A plain answer.",), *, tags: Sequence[str] = ()
) -> Path:
    """Write the model, and return its folder.

    `turns` are its answers to requests with tools: the first where the conversation has no answer yet, the second where
    it has one, and so on; the last is repeated. `plain` are its answers to requests without tools. tags: special
    tokens, each of which may be there once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = {f"<|turn_{place}|>": text for place, text in enumerate(turns)}
    said |= {f"<|plain_{place}|>": text for place, text in enumerate(plain)}
    tokenizer = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    taken = set(tokenizer["model"]["vocab"])  # these would keep their own ids
    paths = [[begin, *_cut(text, taken, tags), END] for begin, text in said.items()]
    names = list(dict.fromkeys(["<|im_start|>", END, *said, *tags, *(each for path in paths for each in path[1:-1])]))
    ids = {name: len(tokenizer["model"]["vocab"]) + place for place, name in enumerate(names)}
    for name, number in ids.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = name in said or name in (*names[:2], *tags)
        tokenizer["added_tokens"].append({"id": number, "content": name, **flags, "special": special})
    template = TEMPLATE.replace("LAST_TURN", str(len(turns) - 1)).replace("LAST_PLAIN", str(len(plain) - 1))
    known = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    known |= {"chat_template": template, "eos_token": END, "model_max_length": LONGEST}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    size = -(-(max(ids.values()) + 1) // 64) * 64
    (folder / "config.json").write_text(json.dumps(_config(size, ids[END])))
    edges = [(ids[one], ids[other]) for path in paths for one, other in pairwise(path)]
    save_file(_weights(size, edges), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _cut(text: str, taken: set[str], fixed: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of a text. Those in `fixed` stay whole."""
    for part in re.split("(" + "|".join(map(re.escape, fixed)) + ")", text) if fixed else [text]:
        yield from [part] if part in fixed else _pieces(part, taken)


def _pieces(text: str, taken: set[str]) -> list[str]:
    """Cut a text into pieces that are no tokens yet, and take them."""
    found: list[str] = []
    while text:
        size = next((size for size in range(PIECE, len(text)) if text[:size] not in taken), len(text))
        while text[:size] in taken:  # a last piece that is not new joins those before it
            if not found:
                raise ValueError(f"the script says {text!r} twice; say it in other words the second time")
            text = found.pop() + text
            size = len(text)
        found.append(text[:size])
        taken.add(text[:size])
        text = text[size:]
    return found


def _config(size: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": LONGEST,
        "sliding_window": WINDOW,  # long prompts cost no more than their length
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def _weights(size: int, edges: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Return weights by which each edge's first token has its second as the most likely next, at any usual temperature:
    tokens are random signs, and the head's row of a token is that of the one before it."""
    signs = torch.randint(0, 2, (size, HIDDEN), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
    head = torch.zeros(size, HIDDEN)
    for one, other in edges:
        head[other] += signs[one]
    return {"model.embed_tokens.weight": signs, "lm_head.weight": head, **dict(_nothing())}


def _nothing() -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a layer that adds nothing."""
    layer = "model.layers.0"
    shapes = {"q": (HEAD, HIDDEN), "k": (HEAD, HIDDEN), "v": (HEAD, HIDDEN), "o": (HIDDEN, HEAD)}
    for name, shape in shapes.items():
        yield f"{layer}.self_attn.{name}_proj.weight", torch.zeros(shape)
    for name, shape in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
        yield f"{layer}.mlp.{name}_proj.weight", torch.zeros(shape)
    for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
        yield f"{name}.weight", torch.ones(HIDDEN)
