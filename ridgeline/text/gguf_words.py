"""The words into which byte-level vocabularies of GGUF files cut text, and which no merge crosses:
`tokenizer.ggml.pre` names the way.

The patterns are those of the models' own tokenizer.json, as llama.cpp quotes them. Families that cut alike have names
of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers

from ridgeline.text.tiktoken_tokenizer import KIMI_WORDS

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES


def _words(digits: str, letters: str = r"\p{L}", lines: str = r"\s*[\r\n]+") -> str:
    """Return the pattern of Llama 3 and its kin: letters with the character before them, digits, the rest, spaces."""
    other = letters.strip("[]")
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}"
        rf"| ?[^\s{other}\p{{N}}]+[\r\n]*|{lines}|{_SPACES}"
    )


def _cased(digits: str, *, ending: str = "") -> str:
    """Return the pattern of GPT-4o and its kin, where a capital letter behind a small one begins a new word."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


_MARKED = (  # DeepSeek-V3's: a sign before Latin letters goes with them
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
# The letters of DeepSeek's first models: of scripts that have capitals.
_CAPITAL_SCRIPTS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True)
class Way:
    """A way to cut text.

    patterns: what each matches is a word. A later one cuts what the earlier ones left whole.
    composed: text is first brought into the form NFC.
    whole_first: a word that is a token as a whole is that token, even if no merges lead there.
    add_bos: a prompt begins with BOS, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    composed: bool = False
    whole_first: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2_WAY = Way((_GPT2,))
_DIGITS = Way((r"\p{N}", _GPT2))
_LLAMA3 = Way((_words("{1,3}"),), whole_first=True, add_bos=True)
_QWEN2 = Way((_words(""),), composed=True)
_DEEPSEEK3 = Way((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _MARKED))
_GPT4O = Way((_cased("{1,3}", ending=f"{_CONTRACTION}?"),))
_FALCON = Way((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
_SEED = Way(
    (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",)
)
_BAILING = Way(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES,)
)

_BLOOM = Way((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))
_MARKS = r"\p{L}\p{M}*(?: \p{L}\p{M}*)*"  # letters with their marks, and single ones behind spaces
_EXAONE_MOE = Way(
    (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:{_MARKS})+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
    )
)

WAYS: dict[str, Way] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jina-v2-en", "jais", "mellum"), _GPT2_WAY),
    "exaone4": _GPT2_WAY,
    "exaone-moe": _EXAONE_MOE,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "kimi-k2": Way((KIMI_WORDS,)),
    **dict.fromkeys(("trillion", "granite-docling", "modern-bert", "gigachat", "a.x-4.0"), _GPT2_WAY),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), replace(_LLAMA3, whole_first=False, add_bos=False)),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3, add_bos=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "f2llmv2", "megrez", "hunyuan"), _QWEN2),
    **dict.fromkeys(("grok-2", "solar-open"), replace(_QWEN2, composed=False)),
    "qwen35": Way((_words("", r"[\p{L}\p{M}]"),), composed=True),
    **dict.fromkeys(("refact", "command-r", "smollm", "starcoder", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "mellum2": _DIGITS,
    "tekken": Way((_cased(""),), whole_first=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "deepseek-llm": Way(
        (
            "[\r\n]",
            rf"\s?[{_CAPITAL_SCRIPTS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}",
        )
    ),
    "deepseek-coder": Way(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "falcon": _FALCON,
    "seed-coder": _SEED,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
}
