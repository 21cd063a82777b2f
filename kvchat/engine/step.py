"""How one decode step is executed.

Every executor is called with the last id and the cache, extends the cache by one position and
returns the logits of the next token. Eager execution is the reference that others must agree with.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from kvchat.engine.kv_cache import KVCache
from kvchat.engine.layers import Attention, RMSNorm
from kvchat.engine.linear import (
    AnyEmbedding,
    AnyLinear,
    Int4Linear,
    Int8Linear,
    Linear,
    PackedLinear,
    Stacked,
)
from kvchat.engine.model import Transformer


class DecodeStep(Protocol):
    """Runs one token."""

    def __call__(self, token_id: int, cache: KVCache) -> Tensor:
        """Feed `token_id`; return the logits (vocab_size,) float32 that follow it."""


class EagerStep:
    """The forward pass as it is written, one torch call after another."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __call__(self, token_id: int, cache: KVCache) -> Tensor:
        """Feed one token through the model."""
        input_ids = torch.tensor([[token_id]], device=self.model.device)
        logits, _, _ = self.model(input_ids, cache, cache.length)
        last: Tensor = logits[0, -1]
        return last


class Plan(Protocol):
    """The class of that name in native/kernels.cpp: operations in order, each with its buffer.

    All but `run` return the buffer, (1, n) float32, that the operation's result will be in.
    """

    def embed_rows(self, weight: Tensor) -> Tensor: ...
    def embed_packed(self, blocks: Tensor, bits: int, minima: bool, rows: int) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear_packed(  # noqa: PLR0917 (native methods take no names)
        self, x: Tensor, blocks: Tensor, bits: int, minima: bool, rows: int, bias: Tensor | None
    ) -> Tensor: ...
    def linear_dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def attend(  # noqa: PLR0917 (native methods take no names)
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        rotations: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        n_heads: int,
        window: int,
    ) -> Tensor: ...
    def swiglu(self, gate_up: Tensor) -> Tensor: ...
    def add(self, x: Tensor, y: Tensor) -> Tensor: ...
    def join(self, parts: list[Tensor]) -> Tensor: ...
    def run(self, token_id: int, position: int, threads: int) -> None: ...


class RecordedStep:
    """The forward pass, noted down once by walking the model, then run by one native call a token.

    Inside that call nothing needs the interpreter, so a busy screen hardly slows it. What was
    recorded names the cache's memory; when the cache grows, it is recorded again.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._plan: Plan | None = None
        self._logits = torch.empty(0)
        self._values: Tensor | None = None

    @staticmethod
    def can_run(model: Transformer) -> bool:
        """Whether the kernels know every layer of a model on a CPU."""
        return not any(isinstance(module, Int4Linear | Int8Linear) for module in model.modules())

    @torch.inference_mode()
    def __call__(self, token_id: int, cache: KVCache) -> Tensor:
        """Run the recorded step at the cache's end."""
        cache.reserve(1)
        if self._plan is None or self._values is not cache.values[-1]:
            self._plan = self._record(cache)
        self._plan.run(token_id, cache.length, torch.get_num_threads())
        cache.advance(1)
        return self._logits[0].clone()

    def _record(self, cache: KVCache) -> Plan:
        recorder = _Recorder(self.model, cache)
        self._logits = self.model.logits(self.model.hidden(recorder), recorder)
        self._values = cache.values[-1]
        return recorder.plan


class _Recorder:
    """`Ops` that compute nothing: each returns the buffer that the plan will fill."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.plan: Plan = torch.classes.kvchat.Plan()
        self._cache = cache
        self._table = model.rotary(0, cache.capacity, model.device)

    def embed(self, layer: AnyEmbedding) -> Tensor:
        if isinstance(layer, PackedLinear):
            return self.plan.embed_packed(
                layer.blocks, layer.bits, layer.minima, layer.out_features
            )
        return self.plan.embed_rows(layer.weight)

    def rms_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.plan.rms_norm(x, norm.weight, norm.eps)

    def linear(self, x: Tensor, layer: AnyLinear) -> Tensor:
        if isinstance(layer, PackedLinear):
            return self.plan.linear_packed(
                x, layer.blocks, layer.bits, layer.minima, layer.out_features, layer.bias
            )
        if isinstance(layer, Stacked):
            return self.plan.join([self.linear(x, cast(AnyLinear, p)) for p in layer.parts])
        assert isinstance(layer, Linear)
        return self.plan.linear_dense(x, layer.weight, layer.bias)

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        a, cache = attention, self._cache
        return self.plan.attend(
            qkv,
            cache.keys[a.layer],
            cache.values[a.layer],
            self._table,
            None if a.q_norm is None else a.q_norm.weight,
            None if a.k_norm is None else a.k_norm.weight,
            0.0 if a.q_norm is None else a.q_norm.eps,
            a.n_heads,
            a.window or 0,
        )

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self.plan.swiglu(gate_up)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.plan.add(x, y)
