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


def penalise(
    scores: Scores, context: Sequence[int], params: SamplingParams, exempt_ids: Collection[int]
) -> Scores:
    """Weaken the ids in the last `params.penalty_window` of the context.

    Repetition divides a positive logit and multiplies any other, once for each distinct id: CTRL
    (arXiv 1909.05858, section 4.1) with the sign it leaves out. Presence is subtracted once, and
    frequency once for each time an id occurs, as the OpenAI API defines them.

    Args:
        scores: (V,) logits; not modified.
        context: ids of prompt and reply so far.
        params: penalties and their window.
        exempt_ids: ids that are spared.

    Raises:
        SettingError: a context id the scores do not cover.
    """
    repetition, presence = params.repetition_penalty, params.presence_penalty
    frequency = params.frequency_penalty
    if (repetition, presence, frequency) == (1, 0, 0):
        return scores
    start = 0 if params.penalty_window < 0 else max(0, len(context) - int(params.penalty_window))
    counts = Counter(context[start:])
    penalised_ids = [i for i in counts if i not in exempt_ids]
    if not penalised_ids:
        return scores
    if min(penalised_ids) < 0 or max(penalised_ids) >= len(scores):
        raise SettingError(
            f"The context holds a token id outside this model's vocabulary of {len(scores)} ids; "
            "encode the text with the model's own tokenizer."
        )
    ids = np.array(penalised_ids, dtype=np.intp)
    affected = scores[ids]
    # What leaves float32 becomes infinite or NaN, which the sampler refuses.
    with np.errstate(all="ignore"):
        affected = np.where(affected > 0, affected / repetition, affected * repetition)
        affected -= presence
        if frequency:
            affected -= frequency * np.array([counts[i] for i in penalised_ids])
    penalised = scores.copy()
    penalised[ids] = affected
    return penalised
