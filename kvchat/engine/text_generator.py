"""TextGenerator: the smallest complete use of the engine. Read this first.

A language model maps token ids to a score for every possible next id. Writing text with it is a
loop: score, draw one id, append it, score again. Run naively, each turn of the loop reads the
whole text from the start. The KV cache keeps what the model computed about the text so far, so
that after one prefill of the prompt each step reads a single new token.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import torch

from kvchat.engine.errors import ContextOverflowError, GenerationError
from kvchat.engine.sampling import sample_next_token
from kvchat.engine.types import TextStream


class GrowingWindow:
    """Streams text from any tokenizer: decodes the whole reply each time and shows what is new.

    A character whose bytes are spread over several tokens is held back until it is whole.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0

    def step(self, token_id: int) -> str:
        """Return the text this id completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """Return what was held back."""
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        new, self._shown = text[self._shown :], len(text)
        return new


class TextGenerator:
    """Writes on from a prompt, streaming to the terminal as it goes.

    Args:
        model: called as model(input_ids, past_key_values=None, start_pos=0) with ids (1, T), it
            returns (logits (1, T or 1, vocab_size), loss, past_key_values) and extends the past
            by T positions; `model.config.max_seq_len` is the longest past it takes.
        tokenizer: has encode(text, add_bos=True), decode(ids, skip_special_tokens=False) and
            eos_token_id.
        device: where input ids are put; a torch module is moved there too.
    """

    def __init__(self, model: Any, tokenizer: Any, device: str = "cpu") -> None:
        self.model: Any = model.to(device).eval() if isinstance(model, torch.nn.Module) else model
        self.tokenizer = tokenizer
        self.device = device

    @torch.inference_mode()
    def generate(  # noqa: PLR0917 (callers pass these by position)
        self,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 0.9,
        repetition_penalty: float = 1.1,
        stream: bool = True,
    ) -> str:
        """Return the new text, ended by the end-of-sequence id, a limit, or the context's end.

        Raises:
            GenerationError: the prompt has no tokens.
            ContextOverflowError: the prompt is longer than the model's context.
        """
        prompt_ids = list(self.tokenizer.encode(prompt, add_bos=True))
        limit = self.model.config.max_seq_len
        if not prompt_ids:
            raise GenerationError("the prompt is empty; give the model at least one word")
        if len(prompt_ids) > limit:
            raise ContextOverflowError(
                f"the prompt has {len(prompt_ids):,} tokens and the context holds {limit:,}; "
                "shorten it",
                needed=len(prompt_ids),
                limit=limit,
            )
        ends = getattr(self.tokenizer, "eog_ids", None) or {self.tokenizer.eos_token_id}
        exempt = getattr(self.tokenizer, "exempt_ids", ())
        show = _to_terminal if stream else _to_nowhere
        text = self._text_stream()
        show(prompt)

        generated = list(prompt_ids)
        # Prefill: the whole prompt in one pass fills the cache and scores the first new token.
        logits, _, past = self._run(prompt_ids, None, 0)
        for _ in range(max_new_tokens):
            next_id = sample_next_token(
                logits[0, -1, :],
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                repetition_penalty=repetition_penalty,
                generated_ids=generated,
                exempt_ids=exempt,
            )
            if next_id in ends:
                break
            start_pos = len(generated)
            generated.append(next_id)
            show(text.step(next_id))
            if start_pos >= limit or len(generated) - len(prompt_ids) == max_new_tokens:
                break
            # Decode: the cache holds everything before it, so one token is all there is to read.
            logits, _, past = self._run([next_id], past, start_pos)
        show(text.flush() + "\n")
        new_text: str = self.tokenizer.decode(
            generated[len(prompt_ids) :], skip_special_tokens=False
        )
        return new_text

    def _run(self, ids: list[int], past: Any, start_pos: int) -> tuple[torch.Tensor, Any, Any]:
        input_ids = torch.tensor([ids], dtype=torch.long, device=self.device)
        output: tuple[torch.Tensor, Any, Any] = self.model(
            input_ids, past_key_values=past, start_pos=start_pos
        )
        return output

    def _text_stream(self) -> TextStream:
        if hasattr(self.tokenizer, "stream_decoder"):
            decoder: TextStream = self.tokenizer.stream_decoder()
            return decoder
        return GrowingWindow(lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False))


def _to_terminal(text: str) -> None:
    """Write text through at once; a terminal gets no control codes, which it would obey."""
    if sys.stdout.isatty():
        text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    sys.stdout.write(text)
    sys.stdout.flush()


def _to_nowhere(text: str) -> None:
    """Stand in for the terminal when nothing shall be shown."""
