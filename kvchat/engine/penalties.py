"""The logits processor: penalties on the ids of the context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from kvchat.engine.errors import SettingError
from kvchat.engine.types import SamplingParams

Scores = NDArray[np.float32]
"""Logits of some tokens, in ascending order of their ids."""


Counts = dict[int, int]
"""How often ids, or positions of logits, occur in the context."""


def penalty_counts(
    context: Sequence[int], params: SamplingParams, exempt_ids: Collection[int], vocab_size: int
) -> Counts:
    """Count the ids in the last `params.penalty_window` of the context, if there are penalties.

    Args:
        context: ids of prompt and reply so far.
        params: penalties and their window.
        exempt_ids: ids that are spared.
        vocab_size: how many ids the model has.

    Raises:
        SettingError: a context id that the model does not have.
    """
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if penalties == (1, 0, 0):
        return {}
    start = 0 if params.penalty_window < 0 else max(0, len(context) - int(params.penalty_window))
    counts = {i: n for i, n in Counter(context[start:]).items() if i not in exempt_ids}
    if counts and (min(counts) < 0 or max(counts) >= vocab_size):
        raise SettingError(
            f"The context holds a token id outside this model's vocabulary of {vocab_size} ids; "
            "encode the text with the model's own tokenizer."
        )
    return counts


def penalise(scores: Scores, counts: Counts, params: SamplingParams) -> Scores:
    """Weaken the logits that are counted.

    Repetition divides a positive logit and multiplies any other, once for each distinct id: CTRL
    (arXiv 1909.05858, section 4.1) with the sign it leaves out. Presence is subtracted once, and
    frequency once for each time an id occurs, as the OpenAI API defines them.

    Args:
        scores: (n,) logits; not modified.
        counts: by position in `scores`.
        params: the penalties.
    """
    if not counts:
        return scores
    repetition, frequency = params.repetition_penalty, params.frequency_penalty
    counted = np.array(list(counts), dtype=np.intp)
    affected = scores[counted]
    # What leaves float32 becomes infinite or NaN, which the sampler refuses.
    with np.errstate(all="ignore"):
        affected = np.where(affected > 0, affected / repetition, affected * repetition)
        affected -= params.presence_penalty
        if frequency:
            affected -= frequency * np.array(list(counts.values()))
    penalised = scores.copy()
    penalised[counted] = affected
    return penalised
