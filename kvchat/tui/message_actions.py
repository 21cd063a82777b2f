"""What can be done with one message of the transcript."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvchat.chat.commands import Branch, Continue, Edit, GetPrice, Regenerate, Switch, Truncate
from kvchat.tui.modals.text_editor import TextEditor
from kvchat.tui.widgets.transcript import Action

if TYPE_CHECKING:
    from kvchat.tui.main_screen import MainScreen

_EDIT_NOTES = {
    "user": "The reply is written anew; this version stays beside it.",
    "assistant": "Your version stands beside the model's; continue it, or say something.",
}


class MessageActions:
    """Does what the transcript asks for.

    Args:
        screen: takes the commands, and shows what there is to show.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen
        self._edited: tuple[TextEditor, str] | None = None
        """The open editor, and the message it is about."""

    def act(self, node_id: str, action: Action) -> None:
        """Do something with a message."""
        screen = self.screen
        match action:
            case "copy":
                screen.app.copy_to_clipboard(screen.transcript.copy_text(node_id))
                screen.notify("Copied.", timeout=2)
            case "copy_code":
                self._copy_code(node_id)
            case "edit":
                screen.run_worker(self._edit(node_id), exclusive=True, group="edit")
            case "regenerate":
                screen.submit(Regenerate(node_id))
            case "continue":
                screen.submit(Continue(node_id))
            case "branch":
                screen.submit(Branch(node_id))
                screen.prompt.focus()
            case "delete":
                screen.submit(Truncate(node_id))
            case "previous_sibling":
                self._go_to_sibling(node_id, -1)
            case "next_sibling":
                self._go_to_sibling(node_id, 1)

    def ask_price(self, editor: TextEditor, text: str) -> None:
        """Find out what an edit would cost, while it is being made."""
        if self._edited is not None and self._edited[0] is editor and not self.screen.feed.writing:
            self.screen.submit(GetPrice(text, instead_of=self._edited[1]))

    def show_price(self, price: str) -> None:
        """Show what the edit would cost."""
        if self._edited is not None:
            self._edited[0].price = price

    def _copy_code(self, node_id: str) -> None:
        blocks = self.screen.transcript.code_blocks(node_id)
        if blocks:
            self.screen.app.copy_to_clipboard("\n".join(blocks))
            count = f"{len(blocks)} code blocks" if len(blocks) > 1 else "the code block"
            self.screen.notify(f"Copied {count}.", timeout=2)
        else:
            self.screen.notify("There is no code in this message.", timeout=2)

    async def _edit(self, node_id: str) -> None:
        node = self.screen.pane.conversation.node(node_id)
        editor = TextEditor(node.content, note=_EDIT_NOTES[node.role])
        self._edited = (editor, node_id) if node.role == "user" else None
        text = await self.screen.app.push_screen_wait(editor)
        self._edited = None
        if text is not None and text != node.content:
            self.screen.submit(Edit(node_id, text))

    def _go_to_sibling(self, node_id: str, step: int) -> None:
        sibling = self.screen.pane.conversation.neighbour(node_id, step)
        if sibling.id != node_id:
            self.screen.submit(Switch(sibling.id))
