"""How byte-level vocabularies cut text into words before merging: one row per GGUF name.

A GGUF file names its rule (`tokenizer.ggml.pre`) and does not carry it. Merges were learned on
words cut by exactly that rule, so a near miss gives other ids without any sign of it; a name that
is not here is refused. Sources of the patterns: the `tokenizer.json` of the models named and the
tokenizer classes of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

DIGITS = "single digits"
"""In place of a pattern: each numeric character is a word of its own."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule."""

    splits: tuple[str, ...]
    """Patterns in Oniguruma syntax, applied one after the other; matches and gaps are words."""
    nfc: bool = False
    """Text is brought to Unicode NFC first."""
    ignore_merges: bool = False
    """A word that is in the vocabulary is taken whole, without merging up to it."""
    add_bos: bool = False
    """Sequences begin with bos where the file does not say."""


_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
)
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}"
_GPT4O = (
    rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"|{_SYMBOLS_SLASH}|{_SPACES}"
)

_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[一-龥ࠀ-一가-\ud7ff]+",
    DIGITS,
)
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

_RULES: dict[PreTokenizer, str] = {
    PreTokenizer((_GPT2,)): "default gpt-2 phi-2 exaone4",
    PreTokenizer((_GPT2,), nfc=True): "olmo",
    PreTokenizer((DIGITS, _GPT2)): "smollm starcoder refact codeshell exaone",
    PreTokenizer((DIGITS, _GPT2), nfc=True): "command-r",
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe glm4",
    PreTokenizer((_QWEN2,), nfc=True): "qwen2",
    PreTokenizer((_QWEN2,)): "deepseek-r1-qwen megrez kormo stablelm2 hunyuan",
    PreTokenizer((_QWEN35,), nfc=True): "qwen35",
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    PreTokenizer(_DEEPSEEK_V3): "deepseek-v3 hunyuan-dense",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
    PreTokenizer((_SEED_CODER,)): "seed-coder",
    PreTokenizer((_BAILING,)): "bailingmoe bailingmoe2",
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule for rule, names in _RULES.items() for name in names.split()
}
"""`tokenizer.ggml.pre` -> rule."""
