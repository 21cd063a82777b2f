"""Hugging Face folders: config.json, safetensors weights, generation_config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvchat.engine.config import ModelConfig, RopeConfig
from kvchat.engine.errors import ModelFileError, UnsupportedModelError
from kvchat.engine.linear import Blocks
from kvchat.models.config_values import MAX_LAYERS, check_config, number, section, size, switch
from kvchat.models.families import HF_NAMES, Family, family_of_hf, file_name
from kvchat.models.weights import ALL

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of safetensors weights that can be run."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one.

    Raises:
        ModelFileError: the file is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}; fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is not a JSON object; fetch the model again")
    return value


def model_config(raw: Mapping[str, Any]) -> tuple[ModelConfig, Family]:
    """Translate config.json into our terms; the only place that knows its key names.

    Raises:
        UnsupportedModelError: the architecture or its kind of rope scaling.
        ModelFileError: a size is missing or makes no sense.
    """
    names = raw.get("architectures")
    family = family_of_hf([str(name) for name in names] if isinstance(names, list) else [])
    if quantised := section(raw, "quantization_config"):
        method = quantised.get("quant_method", "an unknown method")
        raise UnsupportedModelError(
            f"this folder's weights are quantised with {method!s:.40}, which is not supported; "
            "take the original weights or a GGUF file of the model"
        )
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(
            f"the activation {act!s:.40} is not supported; supported is silu"
        )
    dim, n_layers = size(raw, "hidden_size"), size(raw, "num_hidden_layers", high=MAX_LAYERS)
    n_heads = size(raw, "num_attention_heads")
    n_kv_heads = size(raw, "num_key_value_heads", n_heads)
    config = ModelConfig(
        family=family.name,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=size(raw, "head_dim", dim // n_heads),
        hidden_dim=size(raw, "intermediate_size"),
        vocab_size=size(raw, "vocab_size"),
        max_seq_len=size(raw, "max_position_embeddings", 2048),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(raw, n_layers),
        tied_embeddings=switch(raw, "tie_word_embeddings"),
    )
    return check_config(config), family


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Read rotary settings as transformers 5 (`rope_parameters`) and 4 (two keys) write them."""
    given = {**raw, **section(raw, "rope_scaling"), **section(raw, "rope_parameters")}
    if number(given, "partial_rotary_factor", 1.0) != 1:
        raise UnsupportedModelError(
            "rotating only a part of each head (partial_rotary_factor) is not supported"
        )
    theta = number(given, "rope_theta", 10_000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=number(given, "factor"))
    if kind == "llama3":
        low, high = number(given, "low_freq_factor"), number(given, "high_freq_factor")
        if low >= high:
            raise ModelFileError(
                f"the model's configuration has a low_freq_factor of {low:g} and a "
                f"high_freq_factor of {high:g}, which must be greater; fetch the model again"
            )
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=number(given, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_seq_len=size(given, "original_max_position_embeddings"),
        )
    raise UnsupportedModelError(
        f"rope scaling of type {kind!s:.40} is not supported; supported are default, linear and "
        "llama3"
    )


class HFWeights:
    """The weights of a Hugging Face folder, memory-mapped."""

    pairs = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.family = model_config(read_json(folder / "config.json"))
        self._files: dict[Path, Any] = {}
        self._homes = self._find_weights()
        self.paths = sorted(set(self._homes.values()))
        self.nbytes = sum(path.stat().st_size for path in self.paths)

    def has(self, name: str) -> bool:
        """Whether the folder holds a weight of this name."""
        return file_name(HF_NAMES, name) in self._homes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(self._slice(name).get_shape())

    def dense(self, name: str, dtype: torch.dtype, rows: slice = ALL) -> Tensor:
        """Return rows of a weight in `dtype`."""
        self._dtype(name)
        key = file_name(HF_NAMES, name)
        file = self._open(self._homes[key])
        tensor: Tensor = file.get_tensor(key) if rows == ALL else file.get_slice(key)[rows]
        return tensor.to(dtype)

    def blocks(self, name: str, rows: slice = ALL) -> Blocks | None:
        """Safetensors files hold no blocks."""
        return None

    def bits(self, name: str) -> float:
        """Return how many bits a number of a weight takes."""
        return 8 * self._dtype(name).itemsize

    def release(self, name: str) -> int:
        """Return a weight's bytes in the file."""
        return int(math.prod(self._slice(name).get_shape()) * self.bits(name)) // 8

    def _dtype(self, name: str) -> torch.dtype:
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            key = file_name(HF_NAMES, name)
            raise UnsupportedModelError(
                f"the weight {key} in {self._homes[key].name} has the type {kind}; supported are "
                + ", ".join(DTYPES)
            )
        return DTYPES[kind]

    def _slice(self, name: str) -> Any:
        key = file_name(HF_NAMES, name)
        return self._open(self._homes[key]).get_slice(key)

    def _find_weights(self) -> dict[str, Path]:
        """Map every weight in the folder to its file, as the files have it."""
        return {key: path for path in self._paths() for key in self._open(path).keys()}  # noqa: SIM118

    def _paths(self) -> list[Path]:
        single = self.folder / "model.safetensors"
        index = self.folder / "model.safetensors.index.json"
        if single.exists():
            return [single]
        if index.exists():
            names = {str(name) for name in section(read_json(index), "weight_map").values()}
            strange = sorted(name for name in names if Path(name).name != name)
            if strange or not names:
                raise ModelFileError(
                    f"{index} names {strange[0] if strange else 'no file'!r:.80} where files next "
                    "to it should stand; fetch the model again"
                )
            paths = [self.folder / name for name in sorted(names)]
        else:
            paths = sorted(self.folder.glob("*.safetensors"))
        missing = [path for path in paths if not path.exists()]
        if missing:
            raise ModelFileError(f"{missing[0]} is missing; fetch the model again")
        if not paths:
            raise self._no_weights()
        return paths

    def _no_weights(self) -> Exception:
        pickled = [p.name for e in ("bin", "pt", "pth") for p in self.folder.glob(f"*.{e}")]
        if pickled:
            return UnsupportedModelError(
                f"{self.folder} holds its weights as {pickled[0]}, a pickle: opening one can run "
                "any program, so it is refused; fetch the model's safetensors or a GGUF file"
            )
        return ModelFileError(f"{self.folder} holds no safetensors weights; fetch the model again")

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelFileError(
                    f"{path} is not a sound safetensors file ({error}); fetch the model again"
                ) from error
        return self._files[path]
