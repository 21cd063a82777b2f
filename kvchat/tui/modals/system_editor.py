"""SystemEditor: the system prompt, to be changed."""

from __future__ import annotations

from kvchat.tui.modals.text_editor import TextEditor


class SystemEditor(TextEditor):
    """Answers with the new system prompt; an empty one is none.

    Args:
        text: the prompt so far.
    """

    def __init__(self, text: str) -> None:
        super().__init__(
            text,
            title="System prompt",
            note="It stands before the conversation, so the model reads everything again.",
            placeholder="You are a helpful assistant.",
        )
