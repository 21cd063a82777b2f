"""The user's own keys: what can be used is, the rest is told."""

from __future__ import annotations

from collections import Counter

import pytest

from kvchat.tui.app import KvchatApp
from kvchat.tui.keymap import Keymap, own_bindings
from kvchat.tui.main_screen import MainScreen


def test_keys_are_taken_as_people_write_them():
    keymap = Keymap.of({"chat.help": "Ctrl+B, ?", "chat.stop": "ctrl+X", "app.theme": "alt+/"})
    assert keymap.problems == ()
    assert keymap.keys == {
        "chat.help": "ctrl+b,question_mark",
        "chat.stop": "ctrl+x",
        "app.theme": "alt+slash",
    }
    assert keymap.first("chat.help") == "Ctrl+B"


@pytest.mark.parametrize("key", ["ctrl+zz", "f99", "control+x", "ctrl+", "ab", ","])
def test_a_key_that_does_not_exist_is_told_and_takes_nothing_away(key):
    keymap = Keymap.of({"chat.help": key})
    assert keymap.keys == {}
    assert len(keymap.problems) == 1
    assert "chat.help" in keymap.problems[0]
    assert keymap.first("chat.help") == "F1"


def test_a_name_that_does_not_exist_is_told_with_the_nearest():
    keymap = Keymap.of({"chat.hlp": "f12"})
    assert keymap.keys == {}
    assert "did you mean 'chat.help'" in keymap.problems[0]


def test_a_key_for_two_things_is_told_once():
    assert len(Keymap.of({"chat.help": "f2"}).problems) == 1
    assert len(Keymap.of({"chat.help": "f15", "chat.model": "f15"}).problems) == 1
    assert Keymap.of({"chat.help": "f2", "chat.sliders": "f1"}).problems == ()


def test_no_key_of_the_screen_is_there_twice():
    for kind in (MainScreen, KvchatApp):
        keys = Counter(k for b in own_bindings(kind) for k in b.key.split(","))
        assert keys.most_common(1)[0][1] == 1


def test_every_key_of_ours_has_a_name_it_can_be_bound_by():
    for kind in (MainScreen, KvchatApp):
        for binding in own_bindings(kind):
            assert binding.id
            assert binding.tooltip
