"""`python -m kvchat`."""

from __future__ import annotations

from kvchat.cli import main

main()
