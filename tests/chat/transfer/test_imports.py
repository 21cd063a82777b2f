"""Other programs' files: trees, lists of messages, and what has no place in ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.chat.conversation import Conversation
from kvchat.chat.transfer import BadRecord, _conversation, read
from kvchat.chat.transfer.records import RecordError
from kvchat.chat.transfer.tree import Said, chain, grow
from kvchat.engine.errors import KvchatError


def spoken(chat: Conversation) -> list[tuple[str, str]]:
    return [(node.role, node.content) for node in chat.active_path()]


def one(record: object) -> Conversation:
    return _conversation(json.loads(json.dumps(record)))


def node(
    role: str, parent: str | None, text: object, *children: str, **more: Any
) -> dict[str, Any]:
    content = text if isinstance(text, dict) else {"content_type": "text", "parts": [text]}
    message = {"author": {"role": role}, "content": content, "create_time": 1.7e9, **more}
    return {"id": "x", "message": message, "parent": parent, "children": list(children)}


HIDDEN = {"is_visually_hidden_from_conversation": True}
CODE = {"content_type": "code", "text": "search()"}
RECAP = {"content_type": "reasoning_recap", "content": "5s"}

CHATGPT: dict[str, Any] = {
    "title": "Parks",
    "create_time": 1700000000.5,
    "current_node": "b2",
    "mapping": {
        "root": {"id": "root", "message": None, "parent": None, "children": ["sys"]},
        "sys": node("system", "root", "", "u1", metadata=HIDDEN),
        "custom": node("system", "root", "Be brief."),
        "u1": node("user", "sys", "Where?", "think", "b1"),
        "b1": node("assistant", "u1", "Nowhere."),
        "think": node(
            "assistant",
            "u1",
            {"content_type": "thoughts", "thoughts": [{"summary": "Parks", "content": "Hm."}]},
            "call",
        ),
        "call": node("assistant", "think", CODE, "tool", recipient="web"),
        "tool": node("tool", "call", "results", "recap"),
        "recap": node("assistant", "tool", RECAP, "a1"),
        "a1": node("assistant", "recap", "The park.", "u3", "u2"),
        "u2": node(
            "user",
            "a1",
            {
                "content_type": "multimodal_text",
                "parts": [{"content_type": "image_asset_pointer", "asset_pointer": "x"}, "Why?"],
            },
            "b2",
        ),
        "b2": node("assistant", "u2", "Trees."),
        "u3": node("user", "a1", "And home?"),
    },
}


def test_chatgpts_tree_keeps_its_branches_and_loses_its_machinery() -> None:
    chat = one(CHATGPT)
    assert (chat.title, chat.system, chat.started.timestamp()) == (
        "Parks",
        "Be brief.",
        1700000000.5,
    )
    assert spoken(chat) == [
        ("user", "Where?"),
        ("assistant", "The park."),
        ("user", "[image_asset_pointer]\nWhy?"),
        ("assistant", "Trees."),
    ]
    first, reply, *_ = chat.active_path()
    assert reply.reply is not None and reply.reply.thinking == "Parks\n\nHm."
    texts = {key: [chat.nodes[c].content for c in among] for key, among in chat.children.items()}
    assert texts[first.id] == ["The park.", "Nowhere."]
    assert texts[reply.id] == ["And home?", "[image_asset_pointer]\nWhy?"]
    assert first.created.timestamp() == 1.7e9


def test_imported_replies_are_over_and_can_be_edited_and_regenerated() -> None:
    chat = one(CHATGPT)
    reply = chat.active_path()[-1]
    assert reply.reply is not None and not reply.running and reply.edited
    chat.regenerate(reply.id)
    assert chat.siblings(reply.id) == (0, 2)


REASONED = """<details type="reasoning" done="true" duration="3">
<summary>Thought for 3 seconds</summary>
&gt; A &lt;park&gt;?
> Yes.
</details>
The park."""

WEBUI: dict[str, Any] = {
    "id": "c",
    "title": "Parks",
    "created_at": 1700000000,
    "chat": {
        "params": {"system": "Be brief."},
        "history": {
            "currentId": "a2",
            "messages": {
                "a1": {"parentId": "u", "childrenIds": [], "role": "assistant", "content": "No"},
                "u": {
                    "parentId": None,
                    "childrenIds": ["a1", "a2"],
                    "role": "user",
                    "content": "Where?",
                    "timestamp": 1700000001,
                },
                "a2": {
                    "parentId": "u",
                    "childrenIds": [],
                    "role": "assistant",
                    "content": REASONED,
                },
            },
        },
    },
}


def test_open_webuis_tree() -> None:
    chat = one(WEBUI)
    assert (chat.title, chat.system, chat.started.timestamp()) == ("Parks", "Be brief.", 1.7e9)
    assert spoken(chat) == [("user", "Where?"), ("assistant", "The park.")]
    question, answer = chat.active_path()
    assert answer.reply is not None and answer.reply.thinking == "A <park>?\nYes."
    assert chat.siblings(answer.id) == (1, 2)
    assert question.created.timestamp() == 1700000001
    assert spoken(one(WEBUI["chat"])) == spoken(chat)


def test_open_webuis_chats_without_a_history() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = one({"title": "t", "chat": {"messages": messages}})
    assert (chat.title, spoken(chat)) == ("t", [("user", "a"), ("assistant", "b")])


def test_details_that_are_not_closed_stay_text() -> None:
    record = json.loads(json.dumps(WEBUI))
    text = '<details type="reasoning">' * 3 + "oh"
    record["chat"]["history"]["messages"]["a2"]["content"] = text
    assert spoken(one(record))[-1] == ("assistant", text)


def test_openai_messages() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "A park.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Why?"},
    ]
    chat = one({"messages": messages})
    assert chat.system == "Be brief."
    assert spoken(chat) == [
        ("user", "Look:\n[image_url]"),
        ("assistant", "A park."),
        ("user", "Why?"),
    ]
    reply = chat.active_path()[1].reply
    assert reply is not None and reply.thinking == "Hm."


def test_sharegpt() -> None:
    messages = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Where?"},
        {"from": "gpt", "value": "<think>\nHm.\n</think>\n\nThe park."},
    ]
    chat = one({"id": "7", "conversations": messages})
    assert chat.system == "Be brief."
    assert spoken(chat) == [("user", "Where?"), ("assistant", "The park.")]
    reply = chat.active_path()[1].reply
    assert reply is not None and reply.thinking == "Hm."
    mixed = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert spoken(one({"conversations": mixed, "system": "s"})) == [
        ("user", "a"),
        ("assistant", "b"),
    ]


def test_a_greeting_gets_a_silent_user_before_it() -> None:
    chat = chain([Said(None, "assistant", "Hello!"), Said(None, "user", "Hi.")])
    assert spoken(chat) == [("user", ""), ("assistant", "Hello!"), ("user", "Hi.")]


def test_messages_of_one_role_in_a_row_become_one() -> None:
    said = [Said(None, "user", "a"), Said(None, "user", "b"), Said(None, "assistant", "c")]
    assert spoken(chain(said)) == [("user", "a\n\nb"), ("assistant", "c")]
    branching = {
        "a": Said(None, "user", "a"),
        "b": Said("a", "user", "b"),
        "c": Said("a", "user", "c"),
        "d": Said("a", "assistant", "d"),
    }
    chat = grow(branching, "d")
    assert spoken(chat) == [("user", "a"), ("assistant", "d")]
    assert sorted(chat.nodes[c].content for c in chat.children[None]) == ["a", "a\n\nb", "a\n\nc"]


def test_long_chains_and_circles() -> None:
    said = {str(n): Said(str(n - 1), ("user", "assistant")[n % 2], "x") for n in range(5000)}
    assert len(grow(said, "4999").active_path()) == 5000
    said["0"].parent = "4999"
    with pytest.raises(RecordError, match="circle"):
        grow(said, "4999")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"mapping": {}}, "no messages"),
        ({"mapping": {"a": 3}}, "node 'a' must be an object"),
        ({"messages": ["hi"]}, "message 1 must be an object"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of message 1"),
        ({"conversations": []}, "no messages"),
        ({"chat": {"history": {"messages": {"a": []}}}}, "message 'a' must be an object"),
        ({"something": "else"}, "not a conversation of"),
        ([], "not a conversation of"),
        (None, "not a conversation of"),
    ],
)
def test_what_is_wrong_is_named(record: object, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        one(record)


def test_a_file_may_mix_formats_and_have_bad_records(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    messages = {"messages": [{"role": "user", "content": "half a pair: \ud800"}]}
    path.write_text(json.dumps([CHATGPT, {"mapping": {}}, WEBUI, 5, messages]))
    first, second, third, fourth, fifth = read(path)
    assert isinstance(first, Conversation) and isinstance(third, Conversation)
    assert second == BadRecord(2, "there are no messages in it")
    assert isinstance(fourth, BadRecord) and fourth.number == 4
    assert isinstance(fifth, Conversation) and spoken(fifth) == [("user", "half a pair: \ufffd")]


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.sampled_from([CHATGPT, WEBUI]), st.data())
def test_no_change_of_a_record_crashes(record: dict[str, Any], data: st.DataObject) -> None:
    value: Any = json.loads(json.dumps(record))
    at = value
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
        else:
            break
    at[key] = data.draw(_JSON)
    try:
        chat = _conversation(value)
    except (RecordError, KvchatError):
        return
    roles = [node.role for node in chat.active_path()]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
