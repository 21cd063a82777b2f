"""Which tokens end a reply.

Model files often declare one end-of-sequence id while their chat template ends a turn with
another token, so the declared ids are joined with those known by their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EOG_TEXTS = frozenset(
    {
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",
        "<|im_end|>",  # ChatML: Qwen, SmolLM2
        "<|end|>",  # Phi-3
        "<|endoftext|>",
        "<|end_of_text|>",  # Llama 3 base, Granite
        "<|return|>",  # harmony
        "<|call|>",
        "<|calls|>",  # Solar Open
        "<|flush|>",
        "<end_of_turn>",  # Gemma
        "<turn|>",
        "<eos>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",  # Kimi K2
        "[EOS]",
        "<end_of_utterance>",  # SmolVLM
        "<｜end▁of▁sentence｜>",  # DeepSeek
        "[e~[",  # MiniMax
    }
)
"""Texts of tokens that end a turn in some family of models."""

_CHANNEL_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Where a vocabulary has one of these pairs, `<|end|>` ends a channel and not the reply."""


def eog_ids(declared: Iterable[int], added: Mapping[str, int]) -> frozenset[int]:
    """Return the ids that end a reply.

    Args:
        declared: ids the model's files name as end of sequence, of turn or of message.
        added: text -> id of the tokens that ordinary text never yields.
    """
    texts = EOG_TEXTS & added.keys()
    if any(pair <= added.keys() for pair in _CHANNEL_ENDS):
        texts -= {"<|end|>"}
    return frozenset(declared) | {added[text] for text in texts}
