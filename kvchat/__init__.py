"""kvchat: terminal chat for local language models."""

__version__ = "0.1.0"
