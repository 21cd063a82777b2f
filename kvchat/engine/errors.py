"""Every failure a user can cause or meet, as one family of exceptions.

The message of a `KvchatError` is one or two plain sentences: what is wrong and what to do about
it. The command line prints it as it stands; the screen shows it as a notification.
"""

from __future__ import annotations


class KvchatError(Exception):
    """Base of all expected failures; its text names the cause and the remedy."""


class ModelNotFoundError(KvchatError):
    """No model of that name or path is on this disk."""


class ModelFileError(KvchatError):
    """A model file is truncated, corrupt, or says things about itself that cannot be true."""


class SnapshotError(KvchatError):
    """A KV snapshot cannot be used; the text goes on from its name.

    Attributes:
        damaged: it is of no use to anybody, rather than made with something else.
    """

    def __init__(self, message: str, *, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged


class UnsupportedModelError(KvchatError):
    """A sound model file of a kind this program cannot run (architecture, quantisation, …)."""


class TokenizerError(KvchatError):
    """The tokenizer is missing, or of a kind that would have to be guessed."""


class TemplateError(KvchatError):
    """The chat template refuses the conversation or cannot be rendered."""


class DownloadError(KvchatError):
    """A download failed; nothing half-written is left in place of a model."""


class SettingError(KvchatError):
    """A setting has a value outside its range."""


class ContextOverflowError(KvchatError):
    """More tokens than the context holds.

    Attributes:
        needed: tokens that would have to fit.
        limit: tokens the context holds.
        can_drop: leaving out old turns would make it fit.
        can_begin: the prompt itself fits, though it leaves little room for a reply.
    """

    def __init__(
        self,
        message: str,
        *,
        needed: int,
        limit: int,
        can_drop: bool = False,
        can_begin: bool = False,
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit
        self.can_drop = can_drop
        self.can_begin = can_begin


class GenerationError(KvchatError):
    """The model computed something that cannot be sampled from, such as NaN."""


class OutOfMemoryError(KvchatError):
    """The machine or its GPU has no memory left."""


class Cancelled(Exception):
    """The user asked to stop. Not an error: raised inside the engine, never shown."""
