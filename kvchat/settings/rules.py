"""Every setting: which values it takes, and what it is for."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values a setting takes, and how it is explained."""

    kind: type
    about: str
    """One or two sentences."""
    unset: str = ""
    """What holds when it is not set, if that is no value."""
    example: Any = None
    """A value to show where there is no default one."""
    low: int | None = None
    choices: tuple[str, ...] = ()
    can_be_empty: bool = False

    @property
    def expected(self) -> str:
        """The values it takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {
            str: "text" if self.can_be_empty else "text that is not empty",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            tuple: "a list of texts",
        }[self.kind]
        return words if self.low is None else f"{words} from {self.low}"

    def refuses(self, value: object) -> str | None:
        """Say what is wrong with a value, or None."""
        accepted = {float: (int, float), tuple: (list, tuple)}.get(self.kind, self.kind)
        sound = (
            isinstance(value, accepted)
            and (self.kind is bool or not isinstance(value, bool))
            and (not self.choices or value in self.choices)
            and (self.low is None or (isinstance(value, int) and value >= self.low))
            and (self.kind is not str or value != "" or self.can_be_empty)
            and (not isinstance(value, list | tuple) or all(isinstance(v, str) for v in value))
        )
        return None if sound else f"must be {self.expected}, not {value!r}"

    def read(self, text: str) -> Any:
        """Turn an environment variable's text into a value; raises ValueError."""
        if self.kind is tuple:
            return (text,)
        if self.kind is bool:
            words = {"1": True, "true": True, "yes": True, "on": True}
            words |= {"0": False, "false": False, "no": False, "off": False}
            if text.lower() not in words:
                raise ValueError(text)
            return words[text.lower()]
        return self.kind(text)


MODELS_OWN = "the model's own"


def _sampling(kind: type, example: Any, about: str) -> Rule:
    return Rule(kind, about, MODELS_OWN, example)


SAMPLING_RULES: dict[str, Rule] = {
    "temperature": _sampling(
        float, 0.8, "Lower is more predictable; 0 takes the most probable token."
    ),
    "top_k": _sampling(int, 50, "Choose among the k most probable tokens; 0 is off."),
    "top_p": _sampling(
        float, 0.9, "Choose among the fewest tokens that together reach p; 1 is off."
    ),
    "min_p": _sampling(float, 0.05, "Drop tokens less probable than this share of the best."),
    "repetition_penalty": _sampling(float, 1.1, "Weaken tokens that were used already; 1 is off."),
    "presence_penalty": _sampling(float, 0.0, "Subtract from tokens that were used already."),
    "frequency_penalty": _sampling(float, 0.0, "Subtract for each time a token was used."),
    "penalty_window": _sampling(int, 256, "How many last tokens the penalties look at; -1 is all."),
    "penalise_all": _sampling(bool, False, "Penalise punctuation and control tokens too."),
    "temperature_last": _sampling(bool, False, "Apply the temperature after the truncations."),
    "max_tokens": Rule(int, "Longest reply in tokens.", "as long as the context holds", 1024),
    "seed": Rule(int, "The same seed gives the same reply.", "a fresh one each time", 42),
    "stop": Rule(tuple, "Texts that end a reply; they are not part of it.", "none", ("###",)),
}
"""Kinds only: ranges are the engine's, and checked with a `RangeCheck`."""

RangeCheck = Callable[[str, Any], str | None]
"""Says why a sampling parameter of the right kind cannot have a value, or None."""

RULES: dict[str, Rule] = {
    "model": Rule(
        str, "A name that `kvchat models` lists, one from the Hub, or a path to a file or folder."
    ),
    "device": Rule(str, "Where to compute: auto, cpu, cuda or mps."),
    "dtype": Rule(
        str,
        "Type of weights that are not quantised.",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    "quant": Rule(
        str,
        "How to hold the weights in memory.",
        choices=("auto", "none", "int8", "int4"),
    ),
    "kv": Rule(
        str,
        "Type of the cached keys and values: auto is bfloat16 with our own kernels.",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    "ctx": Rule(int, "Context length in tokens.", "what the model was made for", 8192, low=1),
    "threads": Rule(int, "Compute threads.", "measured", 4, low=1),
    "kernels": Rule(
        str,
        "kvchat's own kernels for the CPU: auto uses them and builds them while a chat is idle, "
        "use builds none by itself, off leaves them aside.",
        choices=("auto", "use", "off"),
    ),
    "speculate": Rule(
        bool,
        "Guess tokens from what was written before, and check several in one step where that pays. "
        "It changes no token's probability.",
    ),
    "theme": Rule(str, "Colour theme of the screen.", "kvchat's own", "paper"),
    "system": Rule(
        str, "System prompt of new chats.", "none", "Answer briefly.", can_be_empty=True
    ),
    "persona": Rule(str, "Name of one of the personas below, for new chats.", "none", "coder"),
    "stash_mb": Rule(
        int, "Memory in MiB that keeps what edits and branches cut off the cache.", low=0
    ),
    "packed_mb": Rule(
        int,
        "Disk space in MiB for the weights of all models as they are packed for this processor, "
        "which makes the next start quicker; those not used for longest go first. 0 keeps none.",
        low=0,
    ),
    "overflow": Rule(
        str,
        "What to do when a chat no longer fits the context.",
        choices=("ask", "stop", "drop-oldest"),
    ),
    "save_candidates": Rule(
        bool, "Save what each token could have been too; it makes the file of your chats larger."
    ),
    "titles": Rule(
        bool,
        "After the first reply, let the model write the chat's title while it has nothing else to "
        "do. Without it a chat is called by its first words.",
    ),
    "snapshots": Rule(
        bool,
        "Keep the KV cache of chats on the disk, so that a chat that is opened again need not be "
        "read again. Each chat can have its own way.",
    ),
    "snapshots_mb": Rule(
        int,
        "Disk space in MiB for the caches of all chats; those not used for longest go first.",
        low=0,
    ),
    **SAMPLING_RULES,
}
"""By name, in the order in which they are explained."""

PERSONA_RULES: dict[str, Rule] = {
    "model": RULES["model"],
    "system": RULES["system"],
    "preset": Rule(str, "Name of a sampling preset.", "none", "precise"),
    **SAMPLING_RULES,
}
"""What a persona may set."""


def refusal(
    name: str, value: object, rules: dict[str, Rule], in_range: RangeCheck | None = None
) -> str | None:
    """Say why a setting cannot be set to a value, or None."""
    if name in rules:
        if reason := rules[name].refuses(value):
            return f"'{name}' {reason}"
        return in_range(name, value) if in_range and name in SAMPLING_RULES else None
    near = difflib.get_close_matches(name, rules, n=1)
    return f"there is no setting '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")
