"""BranchTree: the whole conversation with all its branches."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Node
from kvchat.chat.plain_text import one_line
from kvchat.tui.modals.dialog import Dialog

_LABEL_CHARACTERS = 200


class BranchTree(Dialog[str]):
    """Answers with the id of a message, to go to its branch.

    Messages that simply follow one another stand below one another; only where the conversation
    branches does the tree go one level deeper.

    Args:
        conversation: what to show; it is only read.
    """

    TITLE = "Branches"
    HINT = "● on the current branch"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "go": ("Go there", "Enter"),
        "cancel": ("Back", "Esc"),
    }
    DEFAULT_CSS = """
    BranchTree {
        .dialog--box { width: 100; height: 92%; }
        Tree { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; }
    }
    """

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self._conversation = conversation

    def compose_body(self) -> ComposeResult:
        """Yield the tree."""
        tree: Tree[str] = Tree("Conversation")
        tree.show_root = False
        tree.guide_depth = 3
        tree.auto_expand = False
        yield tree

    def on_mount(self) -> None:
        """Fill the tree and go to the last message of the current branch."""
        tree = self.query_one(Tree[str])
        conversation = self._conversation
        path = conversation.active_path()
        active = {node.id for node in path}
        unseen = {node.id for node in conversation.unseen(path)}
        here: TreeNode[str] | None = None
        pending: list[tuple[TreeNode[str], str]] = []

        def branch_off(parent: TreeNode[str], node_id: str | None) -> None:
            children = conversation.children.get(node_id, ())
            pending.extend((parent, child) for child in reversed(children))

        branch_off(tree.root, None)
        while pending:
            parent, node_id = pending.pop()
            node = conversation.nodes[node_id]
            label = self._label(node, active=node_id in active, unseen=node_id in unseen)
            follows = conversation.children.get(node_id, ())
            is_branch = node.parent is not None and len(conversation.children[node.parent]) > 1
            begins_level = bool(follows) and (is_branch or len(follows) > 1)
            if begins_level:
                place = parent.add(label, node_id, expand=True)
                branch_off(place, node_id)
            else:
                label = Text.assemble("  ", label)  # under the arrow of the others
                place = parent.add_leaf(label, node_id)
                branch_off(parent, node_id)
            if node_id in active:
                here = place
        tree.focus()
        if here is not None:
            self.call_after_refresh(tree.move_cursor, here)

    @on(Tree.NodeSelected)
    def action_go(self) -> None:
        """Answer with the message under the cursor."""
        node = self.query_one(Tree[str]).cursor_node
        if node is not None and node.data is not None:
            self.dismiss(node.data)

    def _label(self, node: Node, *, active: bool, unseen: bool) -> Text:
        who = "You      " if node.role == "user" else "Assistant"
        words = one_line(node.content[:_LABEL_CHARACTERS]) or "(nothing)"
        marks = [
            *(["edited"] if node.edited else []),
            *(["no longer seen by the model"] if unseen else []),
        ]
        label = Text.assemble(
            "● " if active else "○ ", (who, "bold" if active else ""), f"  {words}"
        )
        if marks:
            label.append(f"  ({', '.join(marks)})", "italic")
        return label
