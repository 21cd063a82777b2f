"""Values of a model's configuration, none of which is believed before it has been checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvchat.engine.config import ModelConfig
from kvchat.engine.errors import ModelFileError

MAX_LAYERS = 4096
"""Some things are made per layer before the weights prove how many there are."""


def size(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    low: int = 1,
    high: int = 2**31 - 1,
) -> int:
    """Return a whole number from `low` to `high`; null is as good as absent.

    Raises:
        ModelFileError: it is anything else, or absent without a default.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _senseless(key, value)
    return value


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number above 0; null is as good as absent.

    Raises:
        ModelFileError: it is anything else, or absent without a default.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise _senseless(key, value)
    return float(value)


def switch(raw: Mapping[str, Any], key: str) -> bool:
    """Return a truth value, false where it is null or absent.

    Raises:
        ModelFileError: it is anything else.
    """
    value = raw.get(key)
    if value not in (None, False, True):
        raise _senseless(key, value)
    return bool(value)


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a nested object, empty where it is null or absent.

    Raises:
        ModelFileError: it is anything else.
    """
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _senseless(key, value)
    return value


def check_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration if its sizes agree with each other.

    Raises:
        ModelFileError: they do not.
    """
    if config.n_heads % config.n_kv_heads or config.head_dim % 2:
        raise ModelFileError(
            f"the model's configuration has {config.n_heads} heads over {config.n_kv_heads} key "
            f"heads of {config.head_dim} features, which do not divide; fetch it again"
        )
    return config


def _senseless(key: str, value: object) -> ModelFileError:
    return ModelFileError(
        f"the model's configuration gives {key} as {value!r:.80}, which makes no sense; "
        "fetch the model again"
    )
