"""The keys of the chat: what is pressed, what it does, and what the palette says about it."""

from __future__ import annotations

from textual.binding import Binding


def _key(
    key: str,
    action: str,
    description: str,
    tooltip: str,
    *,
    id: str,
    priority: bool = False,
) -> Binding:
    return Binding(
        key,
        action,
        description,
        id=f"chat.{id}",
        tooltip=tooltip,
        priority=priority,
    )


CHAT_KEYS = (
    _key("escape", "stop", "Stop", "End the reply and keep what came", id="stop"),
    _key("f7", "pause", "Pause", "Hold the reply, or let it go on", id="pause"),
    _key("f8", "step", "Step", "Write one token and hold the reply", id="step"),
    _key("f1", "help", "Help", "Show all keys", id="help"),
    _key(
        "ctrl+p",
        "app.command_palette",
        "Commands",
        "Find every command",
        id="commands",
    ),
    _key("f2", "toggle_sidebar", "Sliders", "Go to the sliders and back", id="sliders"),
    _key(
        "ctrl+r",
        "regenerate",
        "Regenerate",
        "Write the last reply anew, beside the old one",
        id="regenerate",
    ),
    _key(
        "f12,alt+e", "edit_last", "Edit last message", "Change what you said last", id="edit-last"
    ),
    _key("ctrl+g", "continue", "Continue", "Let the last reply go on", id="continue"),
    _key("f4", "choose_model", "Model", "Chat with another model", id="model"),
    _key(
        "f6",
        "branches",
        "Branches",
        "Go to another branch of the chat",
        id="branches",
    ),
    _key("ctrl+n", "new_chat", "New chat", "Begin another chat", id="new"),
    _key("ctrl+l", "chats", "Chats", "Open, search, rename or delete chats", id="chats"),
    _key("f5", "edit_system", "System prompt", "Change what the model is told first", id="system"),
    _key("ctrl+t", "new_tab", "New tab", "Begin another chat beside this one", id="new-tab"),
    # What scrolls has these two keys too, for scrolling sideways.
    _key(
        "ctrl+pagedown,alt+right",
        "step_tab(1)",
        "Next tab",
        "Go to the chat at the right",
        id="next-tab",
        priority=True,
    ),
    _key(
        "ctrl+pageup,alt+left",
        "step_tab(-1)",
        "Previous tab",
        "Go to the chat at the left",
        id="previous-tab",
        priority=True,
    ),
    _key(
        "ctrl+f4,alt+w",
        "close_tab",
        "Close tab",
        "Close this tab; its chat is kept",
        id="close-tab",
    ),
    _key("f10", "undo_delete", "Undo delete", "Put back what was deleted last", id="undo-delete"),
    _key(
        "f9", "toggle_thinking", "Thinking on or off", "Where the model has a switch", id="thinking"
    ),
    _key("alt+r", "rename", "Rename this chat", "Give it a title", id="rename"),
    _key("alt+g", "tags", "Tags of this chat", "Add or remove tags", id="tags"),
    _key("alt+x", "export", "Export this chat…", "Write it into a file", id="export"),
    _key("alt+i", "import", "Import chats…", "Take in the chats of a file", id="import"),
    _key("alt+p", "personas", "Personas", "Begin a chat with a persona", id="personas"),
    _key(
        "alt+s",
        "save_persona",
        "Save as a persona…",
        "Keep model, system prompt and sliders under a name",
        id="save-persona",
    ),
)
"""In the order of the line of keys."""
