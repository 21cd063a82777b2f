"""Dialogs: each asks one thing and gives its answer by `dismiss`; None is no answer."""
