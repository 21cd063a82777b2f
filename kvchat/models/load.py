"""From a name or a path to a model that answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvchat.engine import native
from kvchat.engine.config import ModelConfig
from kvchat.engine.cuda.graphs import GraphRecorder
from kvchat.engine.cuda.int4 import multiplies_tiles
from kvchat.engine.engine import STASH_BUDGET, Engine
from kvchat.engine.errors import SettingError, TemplateError, UnsupportedModelError
from kvchat.engine.linear import multiplies_bfloat16, weight_class
from kvchat.engine.memory import memory_is_enough
from kvchat.engine.model import Transformer
from kvchat.engine.static_step import StaticStep
from kvchat.engine.step import DecodeStep, EagerStep, RecordedStep
from kvchat.engine.types import LIMITS, LoadProgress, SamplingParams
from kvchat.models import gguf_tokenizer, hf_tokenizer
from kvchat.models.gguf import GGUFFile
from kvchat.models.gguf_weights import GGUFWeights
from kvchat.models.hf import HFWeights, read_json
from kvchat.models.known_costs import pass_costs
from kvchat.models.locate import locate, require
from kvchat.models.packed import BUDGET, FOLDER, PackedLayers, made_from
from kvchat.models.pull import PullProgress, pull
from kvchat.models.template import ChatTemplate, Message
from kvchat.models.threads import best_threads
from kvchat.models.tokenizer import Tokenizer
from kvchat.models.weights import Quant, WeightSource, build_transformer
from kvchat.settings import cache_dir

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_MODEL = "smollm2"
"""The model that is fetched by itself when it is asked for and absent."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "penalty_window",
}
"""Keys of `general.sampling` in GGUF metadata to our parameters."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A loaded model with everything it needs to chat."""

    name: str
    path: Path
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingParams
    """The author's sampling settings where the model carries some, else ours."""
    dtype: str
    quant: Quant
    device: str

    @property
    def model(self) -> Transformer:
        """The Transformer itself."""
        return self.engine.model

    @property
    def config(self) -> ModelConfig:
        """Sizes of the Transformer."""
        return self.engine.config

    @property
    def weights(self) -> str:
        """Class of most of the weights in memory: int4, int8 or a dtype's name."""
        return weight_class(self.model)

    def __call__(
        self, input_ids: Tensor, past_key_values: Any = None, start_pos: int = 0
    ) -> tuple[Tensor, None, Any]:
        """Run tokens as `Transformer.forward` does, so that a TextGenerator takes this too."""
        output: tuple[Tensor, None, Any] = self.model(input_ids, past_key_values, start_pos)
        return output

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (T, vocab_size) float32 of a fresh run."""
        return self.engine.score(token_ids)

    def render(
        self,
        messages: Sequence[Message | Mapping[str, str]],
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """Render messages, as objects or as mappings with role and content, with the template.

        Raises:
            TemplateError: the messages, or the template, are not what they should be.
        """
        try:
            plain = [m if isinstance(m, Message) else Message(**m) for m in messages]
        except TypeError as error:
            raise TemplateError("every message needs a role and a content, and no more") from error
        if not all(isinstance(m.role, str) and isinstance(m.content, str) for m in plain):
            raise TemplateError("the role and the content of a message must be strings")
        return self.template.render(plain, add_generation_prompt=add_generation_prompt, now=now)


def load(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quant: Quant = "auto",
    ctx: int | None = None,
    threads: int | None = None,
    speculate: bool = False,
    kernels: bool = True,
    kv: str = "auto",
    stash_bytes: int = STASH_BUDGET,
    packed_bytes: int = BUDGET,
    progress: Callable[[LoadProgress | PullProgress], None] | None = None,
) -> LanguageModel:
    """Load a model by name, folder or .gguf file; the default model is fetched if it is absent.

    Args:
        name_or_path: a catalogue name, a file or folder, or what `kvchat models` lists.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto, float32, float16 or bfloat16: the type of weights that are not quantised.
        quant: class of the weights of linear layers, see `kvchat.models.weights.Quant`.
        ctx: size of the context in tokens; the model's own by default.
        threads: compute threads on a CPU; measured once for a model on a machine by default, see
            `kvchat.models.threads`.
        speculate: run guesses of the next tokens along where that pays; it changes no token's
            probability. What a pass costs is measured once for a model on a machine, which takes
            about a second.
        kernels: use our own kernels for the CPU where this machine has them.
        kv: auto, float32, float16 or bfloat16: the type of cached keys and values. On a CPU, auto
            is bfloat16 with our own kernels, which read it twice as fast, and float32 without.
        stash_bytes: host memory for cut-off parts of the cache.
        packed_bytes: disk space for the weights of all models as they are packed for this CPU,
            so that the next start is quicker; 0 keeps none.
        progress: called as the default model is fetched and as weights are read; an exception
            from it ends the load.

    Raises:
        KvchatError: with the cause and the remedy.
    """
    name = os.fsdecode(name_or_path)
    if name == DEFAULT_MODEL:
        path = locate(DEFAULT_MODEL) or pull(DEFAULT_MODEL, progress=progress)
    else:
        path = require(name)
    if threads is not None:
        _use_threads(threads)
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    quant = pick_quant(quant, dtype, where)
    source, tokenizer, template, sampling = _open(path)
    if ctx is not None and not _is_whole(ctx, 1, source.config.max_seq_len):
        raise SettingError(
            f"--ctx {ctx!r} is outside 1 to {source.config.max_seq_len}, the model's own context"
        )
    kernels = kernels and where.type == "cpu" and native.load(cache_dir() / native.FOLDER)
    packed = None
    if where.type == "cpu" and packed_bytes:
        key = made_from(source.paths, dtype=kind, quant=quant, kernels=kernels)
        packed = PackedLayers(cache_dir() / FOLDER, key, packed_bytes)
    with memory_is_enough():
        model = build_transformer(
            source,
            dtype=kind,
            quant=quant,
            device=where,
            kernels=kernels,
            packed=packed,
            progress=progress,
        )
    if packed is not None:
        packed.save()
    step = pick_step(model, kernels=kernels)
    model.cache_dtype = pick_kv_dtype(kv, dtype, model, step)
    if threads is None:
        torch.set_num_threads(best_threads(model, step, path, weight_class(model)))
    engine = Engine(
        model,
        eog_ids=tokenizer.eog_ids,
        exempt_ids=tokenizer.exempt_ids,
        max_seq_len=ctx,
        stash_budget=stash_bytes,
        step=step,
    )
    if speculate:
        with memory_is_enough():
            engine.pass_costs = pass_costs(engine, path, weight_class(model))
    return LanguageModel(
        name=name,
        path=path,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        defaults=author_settings(sampling),
        dtype=str(kind).removeprefix("torch."),
        quant=quant,
        device=str(where),
    )


def pick_device(name: str) -> torch.device:
    """Return the device of a name; auto takes CUDA, then MPS, then the CPU.

    Raises:
        SettingError: there is no such device here.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f"{name} is no device; use auto, cpu, cuda or mps") from error
    if not available.get(device.type, False):
        raise SettingError(f"there is no {device.type} device here; use --device auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(f"there are {torch.cuda.device_count()} CUDA devices; {name} is none")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; auto takes bfloat16 where the device multiplies it quickly.

    Raises:
        SettingError: no such dtype.
    """
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        if device.type == "mps":
            return torch.float16
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    if name not in DTYPES:
        raise SettingError(f"{name} is no dtype; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_kv_dtype(name: str, dtype: str, model: Transformer, step: DecodeStep) -> torch.dtype:
    """Return the dtype of cached keys and values; auto obeys a dtype that was asked for.

    Raises:
        SettingError: no such dtype.
    """
    if name == "auto":
        halves = isinstance(step, RecordedStep) and dtype != "float32"
        return torch.bfloat16 if halves else model.cache_dtype
    if name not in DTYPES:
        raise SettingError(f"--kv {name} is no dtype; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_quant(quant: str, dtype: str, device: torch.device) -> Quant:
    """Return the class of weights to use; auto obeys a dtype that was asked for.

    Raises:
        SettingError: no such class.
        UnsupportedModelError: quantised weights on a device whose operators are not there.
    """
    if quant not in ("auto", "none", "int8", "int4"):
        raise SettingError(f"{quant} is no quantisation; use auto, none, int8 or int4")
    on_gpu = device.type == "cuda"
    if quant == "auto":
        kept = device.type == "cpu" or (on_gpu and multiplies_tiles(device))
        return "auto" if kept and dtype == "auto" else "none"
    if quant == "int4" and on_gpu and not multiplies_tiles(device):
        raise UnsupportedModelError(
            "this GPU has no int4 products, which take compute capability 8.0; use --quant none "
            "or --device cpu"
        )
    if quant != "none" and device.type != "cpu" and not (on_gpu and quant == "int4"):
        raise UnsupportedModelError(
            f"{quant} weights run on the CPU only so far; use --quant none or --device cpu"
        )
    return quant  # type: ignore[return-value]


def pick_step(model: Transformer, *, kernels: bool) -> DecodeStep:
    """Return the quickest way to run one token; `kernels` says that our own are loaded."""
    if kernels and RecordedStep.can_run(model):
        return RecordedStep(model)
    if model.device.type == "cuda":
        return StaticStep(model, lambda: GraphRecorder(model.device))
    return EagerStep(model)


def author_settings(given: Mapping[str, Any]) -> SamplingParams:
    """Return our defaults, overridden by the sampling settings that a model carries.

    Values out of range are ignored: they are somebody else's slip, not the user's.
    """
    params = SamplingParams()
    for name in LIMITS.keys() & given.keys() - {"seed", "max_tokens"}:
        try:
            params = params.updated(**{name: given[name]})
        except SettingError:
            continue
    return params


def _open(path: Path) -> tuple[WeightSource, Tokenizer, ChatTemplate, Mapping[str, Any]]:
    if path.is_dir():
        weights = HFWeights(path)  # first: an unknown architecture says more than its tokenizer
        tokenizer = hf_tokenizer.from_folder(path)
        settings = read_json(path / "tokenizer_config.json")
        template = ChatTemplate.from_folder(
            path, settings, [tokenizer.decode([i]) for i in tokenizer.control_ids]
        )
        return weights, tokenizer, template, read_json(path / "generation_config.json")
    file = GGUFFile(path)
    source = GGUFWeights(file)
    tokenizer = gguf_tokenizer.from_gguf_metadata(file.metadata)
    template = ChatTemplate.from_gguf_metadata(file.metadata)
    sampling = {
        ours: file.metadata[f"general.sampling.{theirs}"]
        for theirs, ours in GGUF_SAMPLING.items()
        if f"general.sampling.{theirs}" in file.metadata
    }
    return source, tokenizer, template, sampling


def _use_threads(threads: int) -> None:
    available = os.cpu_count() or 1
    if not _is_whole(threads, 1, available):
        raise SettingError(
            f"--threads {threads!r} is outside 1 to {available}, this machine's CPUs"
        )
    torch.set_num_threads(threads)


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value <= high
