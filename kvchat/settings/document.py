"""The configuration file as `kvchat config init` writes it: every key, explained, commented out."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator

from kvchat.settings import RULES, SAMPLING_RULES, Settings, config_file
from kvchat.settings.rules import MODELS_OWN

_HEAD = """\
# Settings of kvchat.
#
# Each line with a name and "=" shows a setting at its default, or an example where it says so. To
# change one, take the "# " before it away. The later of these win: this file, variables such as
# KVCHAT_MODEL, the persona, flags such as --model. `kvchat config show` tells what holds and why.
"""

_SAMPLING = """
# How tokens are drawn. Each model comes with values of its own; what is set here replaces them. The
# values shown are examples.
[sampling]
"""

_REST = """
# Keys of the screen, by the ids that its help (F1) shows.
[keys]
# chat.stop = "ctrl+x"

# Personas: `kvchat --persona coder`. Each may set a system prompt, a model, a sampling preset (one
# of precise, balanced, creative, or one you saved) and sampling parameters of its own, which win
# over the preset's.
# [personas.coder]
# system = "You are a careful programmer. Answer with code first."
# preset = "precise"
# model = "smollm2"
# max_tokens = 2048
"""


def write_config_file() -> None:
    """Write a configuration file that changes nothing yet.

    Raises:
        FileExistsError: there is one, which stays as it is.
        OSError: it cannot be written.
    """
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(document())


def document() -> str:
    """Return the text of the file."""
    general = "".join(_entries(name for name in RULES if name not in SAMPLING_RULES))
    return f"{_HEAD}{general}{_SAMPLING}{''.join(_entries(SAMPLING_RULES))}{_REST}"


def _entries(names: Iterable[str]) -> Iterator[str]:
    defaults = Settings()
    for name in names:
        rule = RULES[name]
        default = getattr(defaults, name, None)
        about = rule.about
        if rule.choices:
            about += f" {rule.expected.capitalize()}."
        if default is None and rule.unset != MODELS_OWN:
            about += f" Not set: {rule.unset}. For example:"
        lines = textwrap.wrap(about, 98, initial_indent="# ", subsequent_indent="# ")
        value = rule.example if default is None else default
        yield "\n".join(["", *lines, f"# {name} = {toml(value)}", ""])


def toml(value: object) -> str:
    """Write a value as TOML, which agrees with JSON on numbers, texts and lists of texts."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
