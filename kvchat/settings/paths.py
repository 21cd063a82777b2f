"""Where this platform keeps our files. Nothing is created here."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

ENV_PREFIX = "KVCHAT_"


def _folder(variable: str, default: Path) -> Path:
    given = os.environ.get(ENV_PREFIX + variable)
    # Not Path.expanduser, which raises where there is no such home.
    return Path(os.path.expanduser(given)) if given else default


def config_dir() -> Path:
    """The folder of `config.toml` and the user's themes; `KVCHAT_CONFIG_DIR` moves it."""
    return _folder("CONFIG_DIR", platformdirs.user_config_path("kvchat", appauthor=False))


def config_file() -> Path:
    """The configuration file; it need not exist."""
    return config_dir() / "config.toml"


def data_dir() -> Path:
    """The folder of conversations and models; `KVCHAT_DATA_DIR` moves it."""
    return _folder("DATA_DIR", platformdirs.user_data_path("kvchat", appauthor=False))


def cache_dir() -> Path:
    """The folder of what can be made again; `KVCHAT_CACHE_DIR` moves it."""
    return _folder("CACHE_DIR", platformdirs.user_cache_path("kvchat", appauthor=False))


def models_dir() -> Path:
    """The folder models are fetched into."""
    return data_dir() / "models"


def log_file() -> Path:
    """The file diagnostics are written to."""
    return cache_dir() / "kvchat.log"
