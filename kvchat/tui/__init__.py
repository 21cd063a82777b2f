"""The screen. Nothing outside this package knows Textual."""

from __future__ import annotations

import os

if os.environ.get("TERM_PROGRAM") == "iTerm.app":
    # With kitty's key protocol on, iTerm2 loses what an input method commits. Textual reads this
    # when it is imported, so it has to be set here; a value of the user's own stays.
    os.environ.setdefault("TEXTUAL_DISABLE_KITTY_KEY", "1")
