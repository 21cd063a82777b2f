"""Engine: the model, its cache, the stash and the random generator, behind one small interface.

Everything here runs on one thread, except `cancel`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvchat.engine.errors import (
    Cancelled,
    ContextOverflowError,
    GenerationError,
    OutOfMemoryError,
    SnapshotError,
)
from kvchat.engine.generate import Clock, Context, generate, prefill
from kvchat.engine.linear import weight_bytes
from kvchat.engine.memory import memory_is_enough
from kvchat.engine.model import Transformer
from kvchat.engine.sampling import Sampler
from kvchat.engine.snapshot import (
    Check,
    fingerprint,
    never,
    read_snapshot,
    snapshot_bytes,
    write_snapshot,
)
from kvchat.engine.speculation import PassCosts
from kvchat.engine.stash import Stash
from kvchat.engine.step import DecodeStep, EagerStep
from kvchat.engine.token_ids import as_ids, common_prefix
from kvchat.engine.types import (
    GenerationEvent,
    PrefillProgress,
    SamplingParams,
    TextStream,
)

STASH_BUDGET = 512 * 2**20
"""Default host memory for stashed suffixes, in bytes."""

CHUNK_SECONDS = 0.2
"""How long one prefill chunk should take: the grain of progress and of memory."""

THREAD_FLOPS = 1e11
"""Rough multiply-add rate of one CPU thread; only the size of a prefill chunk hangs on it."""


def prefill_chunk_size(n_weights: int, device: torch.device) -> int:
    """Choose tokens per prefill chunk, a power of two.

    Derived from sizes, never from a stopwatch: the number of rows decides which kernels run and
    so the last bits of the result, and a seed has to give the same reply again.
    """
    if device.type != "cpu":
        return 1024
    tokens = CHUNK_SECONDS * THREAD_FLOPS * torch.get_num_threads() / (2 * max(n_weights, 1))
    return max(16, min(256, 1 << max(int(tokens), 1).bit_length()))


class Engine:
    """Runs one sequence: what is cached is reused, what was cut off can come back.

    Args:
        model: the Transformer, on its device.
        eog_ids: ids that end a reply.
        exempt_ids: ids that penalties spare.
        max_seq_len: size of the context in tokens; the model's own by default.
        stash_budget: host memory for cut-off suffixes, in bytes.
        chunk_size: tokens per prefill chunk; chosen from the model's size by default.
        step: runs one token; eagerly by default.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        eog_ids: Collection[int] = (),
        exempt_ids: Collection[int] = (),
        max_seq_len: int | None = None,
        stash_budget: int = STASH_BUDGET,
        chunk_size: int | None = None,
        step: DecodeStep | None = None,
    ) -> None:
        self.model = model
        self.config = model.config
        self.eog_ids = frozenset(eog_ids)
        self.sampler = Sampler(exempt_ids)
        self.step: DecodeStep = step or EagerStep(model)
        self.pass_costs: PassCosts | None = None
        """Lets `generate` run drafts where they pay by these costs; None runs none."""
        self.stash = Stash(stash_budget)
        self.chunk_size = chunk_size or prefill_chunk_size(
            sum(t.numel() for t in model.buffers()), model.device
        )
        self._context = Context(model.new_cache(max_seq_len))
        self._generator = torch.Generator()
        self._cancelled = threading.Event()

    @property
    def ids(self) -> Sequence[int]:
        """The ids whose keys and values are in the cache, exactly."""
        return self._context.ids

    @property
    def max_seq_len(self) -> int:
        """How many tokens the context holds."""
        return self._context.cache.max_seq_len

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self._context.cache.nbytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return self.config.kv_elements_per_token() * self._context.cache.dtype.itemsize

    @property
    def stash_bytes(self) -> int:
        """Host memory held by stashed suffixes."""
        return self.stash.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in memory."""
        return weight_bytes(self.model)

    def cancel(self) -> None:
        """End the running prefill or reply at the next check. Callable from any thread."""
        self._cancelled.set()

    def reusable(self, ids: Sequence[int]) -> int:
        """Return how many leading ids need no prefill: cached, or in the stash."""
        wanted = list(ids)
        reach = common_prefix(self._context.ids, wanted)
        while (found := self.stash.best(wanted, reach)) is not None:
            reach = found[1]
        return min(reach, max(len(wanted) - 1, 0))

    def truncate(self, n: int) -> None:
        """Forget all positions from `n` on; what is cut off goes to the stash if it is worth it."""
        context = self._context
        # A forward pass that was interrupted may have left the two apart by an append.
        context.cache.truncate(len(context.ids))
        cut = len(context.ids) - n
        if cut <= 0:
            return
        if self.stash.accepts(cut, cut * self.kv_bytes_per_token):
            entry = self.stash.covering(context.ids, n)
            if entry is not None:
                self.stash.touch(entry)
            else:
                with suppress(OutOfMemoryError), memory_is_enough():
                    self.stash.put(context.ids, context.cache.copy_from(n))
        context.truncate(n)

    def prefill(self, ids: Sequence[int]) -> Iterator[PrefillProgress]:
        """Make the cache hold exactly `ids`, running only those it does not have.

        Yields progress, first of all with nothing done. A cancel ends it quietly; the chunks
        that were finished stay.

        Raises:
            ContextOverflowError: before anything changes, if they do not fit.
            OutOfMemoryError: the chunks that were finished stay.
        """
        self._cancelled.clear()
        wanted = as_ids(ids)
        self._check_fits(wanted)
        with suppress(Cancelled), memory_is_enough():
            held, _ = self._align(wanted, limit=len(wanted))
            new = wanted[held:]
            yield PrefillProgress(held, len(new), 0)
            for done in prefill(
                self.model,
                self._context,
                new,
                chunk_size=self.chunk_size,
                check=self._check_cancelled,
            ):
                yield PrefillProgress(held, len(new), done)
                self._check_cancelled()

    def generate(
        self,
        ids: Sequence[int],
        params: Callable[[], SamplingParams],
        stream: TextStream,
    ) -> Iterator[GenerationEvent]:
        """Prefill what is missing of `ids`, then decode until something ends the reply.

        The longest prefix of `ids` that is cached or stashed is kept, at most all but one: logits
        are never stale. See `kvchat.engine.generate.generate` for the events.

        Raises:
            ContextOverflowError: before anything changes, if the prompt leaves no room to reply.
            GenerationError: if there is no prompt, or the model computes NaN; the cache is then
                empty, for what it holds may be NaN too.
            OutOfMemoryError: what was run before stays.
        """
        self._cancelled.clear()
        wanted = as_ids(ids)
        if not wanted:
            raise GenerationError("the prompt is empty; give the model at least one word")
        self._check_fits(wanted, room=1)
        try:
            with memory_is_enough():
                _, restored = self._align(wanted, limit=len(wanted) - 1)
                clock = Clock()
                events = generate(
                    self._context,
                    wanted,
                    params,
                    stream,
                    model=self.model,
                    step=self.step,
                    sampler=self.sampler,
                    eog_ids=self.eog_ids,
                    generator=self._generator,
                    chunk_size=self.chunk_size,
                    clock=clock,
                    restored=restored,
                    pass_costs=self.pass_costs,
                    check=self._check_cancelled,
                )
                for event in events:
                    with clock.stopped():
                        yield event
        except GenerationError:
            self._context.truncate(0)
            self._context.cache.release()
            self.stash.clear()
            raise

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (T, vocab_size) float32 of a run in a cache of its own.

        Raises:
            ContextOverflowError: more ids than the context holds.
            GenerationError: no ids, or ids the model does not know.
        """
        ids = as_ids(token_ids)
        if not ids:
            raise GenerationError("there are no tokens to score; pass at least one")
        self._check_known(ids)
        input_ids = torch.tensor([ids], dtype=torch.long, device=self.model.device)
        cache = self.model.new_cache(self.max_seq_len)
        logits, _, _ = self.model(input_ids, cache, 0, all_logits=True)
        scores: Tensor = logits[0]
        return scores

    @property
    def snapshot_bytes(self) -> int:
        """About how many bytes `save` would write."""
        return snapshot_bytes(self._context.cache, len(self.ids))

    def save(self, path: str, about: Mapping[str, str], check: Check = never) -> None:
        """Write the cache and its ids as a safetensors file.

        Args:
            path: the file; it is no snapshot yet if this raises.
            about: what `load` has to agree on, besides what the engine knows itself.
            check: called between two layers; may raise `Cancelled`.

        Raises:
            OSError: it cannot be written.
            OutOfMemoryError: there is no memory to do it in.
        """
        self.truncate(len(self.ids))
        context = self._context
        with memory_is_enough():
            write_snapshot(path, context.cache, context.ids, self._made_with(about), check)

    def load(self, path: str, about: Mapping[str, str], check: Check = never) -> None:
        """Replace the cache by one that `save` wrote; what it held before is stashed.

        Raises:
            SnapshotError: it is damaged, or was made with something else; nothing is held then.
            OutOfMemoryError: it does not fit into memory; nothing is held then.
        """
        self.truncate(0)
        context = self._context
        with memory_is_enough():
            ids = read_snapshot(path, context.cache, self._made_with(about), check)
        try:
            self._check_known(ids)
        except GenerationError as error:
            context.cache.truncate(0)
            raise SnapshotError("it is damaged", damaged=True) from error
        context.ids[:] = ids

    def _made_with(self, about: Mapping[str, str]) -> dict[str, str]:
        return {**fingerprint(self._context.cache, self.config), **about}

    def _align(self, ids: list[int], limit: int) -> tuple[int, int]:
        """Keep or bring back the longest prefix of `ids`, at most `limit` of them.

        Returns how many ids are held then, and how many of those came from the stash.
        """
        held = common_prefix(self._context.ids, ids)
        restored = 0
        while (found := self.stash.best(ids, held)) is not None:
            entry, reach = found
            self.stash.touch(entry)
            self.truncate(held)
            self._context.cache.put_back(entry.suffix, reach)
            self._context.ids += ids[held:reach]
            restored += reach - held
            held = reach
        self.truncate(min(held, limit))
        return len(self._context.ids), restored

    def _check_known(self, ids: list[int]) -> None:
        """Refuse ids without an embedding, which would be read from beyond its end."""
        lowest, highest = min(ids, default=0), max(ids, default=0)
        if lowest < 0 or highest >= self.config.vocab_size:
            raise GenerationError(
                f"token {lowest if lowest < 0 else highest} is not in the model's vocabulary of "
                f"{self.config.vocab_size:,}; the tokenizer belongs to another model, so fetch "
                "this one again"
            )

    def _check_fits(self, ids: list[int], room: int = 0) -> None:
        self._check_known(ids)
        if len(ids) + room > self.max_seq_len:
            raise ContextOverflowError(
                f"the prompt has {len(ids):,} tokens and the context holds {self.max_seq_len:,}; "
                "shorten it, or raise --ctx if the model allows it",
                needed=len(ids) + room,
                limit=self.max_seq_len,
            )

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled
