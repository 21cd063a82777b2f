"""Files cut into records: whatever their shape, whatever is wrong with one of them."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.chat.transfer import records as module
from kvchat.chat.transfer.records import BadRecord, read_records
from kvchat.engine.errors import KvchatError

OBJECTS: list[Any] = [
    {"text": 'quotes " and \\ and \\" brackets ]}[{, 公园'},
    {"nested": [[], {}, [{"a": [1, 2, {"b": "]"}]}]]},
    {},
    {"x": "\\\\"},
]


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(content: str | bytes) -> list[Any]:
        path = tmp_path / "file"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return list(read_records(path))

    return read


def numbered(values: list[Any]) -> list[Any]:
    return list(enumerate(values, start=1))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 2**18])
@pytest.mark.parametrize("indent", [None, 2])
def test_lists_are_cut_at_their_commas(
    read: Any, chunk: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    values = [*OBJECTS, [1, [2]], "a,]", 3, None]
    assert read(json.dumps(values, indent=indent)) == numbered(values)


@given(
    st.lists(
        st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
    ),
    st.integers(1, 9),
)
def test_any_list_is_read(values: list[Any], chunk: int) -> None:
    text = json.dumps(values, ensure_ascii=False)
    chunks = (text[at : at + chunk] for at in range(0, len(text), chunk))
    assert [json.loads(each or "") for each in module._elements(chunks)] == values  # type: ignore[arg-type]


def test_lines_and_single_objects(read: Any) -> None:
    lines = "\n".join(json.dumps(value) for value in OBJECTS)
    assert read(lines) == numbered(OBJECTS)
    assert read("\n\r\n" + lines.replace("\n", "\r\n\r\n")) == numbered(OBJECTS)
    for value in OBJECTS:
        assert read(json.dumps(value, indent=1)) == [(1, value)]
        assert read(json.dumps(value)) == [(1, value)]


def test_marks_of_encodings(read: Any) -> None:
    text = json.dumps(OBJECTS, ensure_ascii=False)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert read(text.encode(encoding)) == numbered(OBJECTS)


@pytest.mark.parametrize(
    ("content", "good", "bad", "said"),
    [
        (b'{"a": 1}\n{"a": \n{"a": 3}', [1, 3], 2, "not valid JSON"),
        (b'{"a": \n{"a": 2}\n{"a": 3}', [2, 3], 1, "not valid JSON"),
        (b'{"a": 1}\n{"a": "\xff"}\n{"a": 3}', [1, 3], 2, "not UTF-8"),
        (b'[{"a": 1}, {"a": oh}, {"a": 3}]', [1, 3], 2, "not valid JSON"),
        (b'[{"a": 1}, {"a": "\xff"}, {"a": 3}]', [1, 3], 2, "not UTF-8"),
        (b'[{"a": 1},, {"a": 3}]', [1, 3], 2, "not valid JSON"),
        (b'[{"a": 1}, {"a": 2}, {"a": "', [1, 2], 3, "ends in the middle"),
        (b'[{"a": 1}, {"a": 2}] {', [1, 2], 3, "something follows"),
        (b'[{"a": 1}, ' + b"[" * 99_999 + b"]" * 99_999 + b', {"a": 3}]', [1, 3], 2, "too deeply"),
        (b'[{"a": 1}, ' + b"1" * 9_999 + b', {"a": 3}]', [1, 3], 2, "thousands of digits"),
    ],
)
def test_one_bad_record_spoils_no_other(
    read: Any, content: bytes, good: list[int], bad: int, said: str
) -> None:
    found = read(content)
    assert [r[1]["a"] for r in found if not isinstance(r, BadRecord)] == good
    (told,) = [r for r in found if isinstance(r, BadRecord)]
    assert told.number == bad == found.index(told) + 1
    assert said in told.reason


@pytest.mark.parametrize("shape", ["[{}]", "{}"])
def test_too_long_a_record_is_not_kept(
    read: Any, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setattr(module, "RECORD_LIMIT", 1000)
    monkeypatch.setattr(module, "_CHUNK", 64)
    values = [{"a": "x" * size} for size in (5, 5000, 7)]
    text = json.dumps(values) if shape == "[{}]" else "\n".join(map(json.dumps, values))
    found = read(text)
    assert found[0] == (1, values[0]) and found[2] == (3, values[2])
    assert found[1] == BadRecord(2, "it has more than 1,000 characters")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"# Chat\n\nhello", "neither JSON nor JSON Lines"),
        (b"\x00\x01\x02", "neither JSON nor JSON Lines"),
        (b"%PDF-1.4 [", "neither JSON nor JSON Lines"),
    ],
)
def test_what_is_no_file_of_records_is_refused(read: Any, content: bytes, said: str) -> None:
    with pytest.raises(KvchatError, match=said):
        read(content)


def test_an_empty_list_has_no_records(read: Any) -> None:
    assert read("[ ]") == []


def test_absent_files_and_folders(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(KvchatError, match="cannot be read"):
            list(read_records(path))


def archive(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as out:
        for name, text in files.items():
            out.writestr(name, text)
    return data.getvalue()


def test_archives_give_their_conversations(read: Any) -> None:
    files = {
        "x/conversations-001.json": '[{"a": 2}]',
        "x/conversations-000.json": '[{"a": 1}]',
        "x/user.json": '{"a": 9}',
    }
    assert read(archive(files)) == [(1, {"a": 1}), (2, {"a": 2})]
    with pytest.raises(KvchatError, match=r"without a conversations\.json"):
        read(archive({"user.json": "{}"}))


def test_damaged_archives_are_refused_and_do_not_crash(read: Any) -> None:
    whole = archive({"conversations.json": json.dumps(OBJECTS * 50)})
    chance = random.Random(1)
    for _ in range(60):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            read(bytes(data))
        except KvchatError as error:
            assert "file" in str(error)


def test_an_archive_beyond_all_proportion_is_refused(read: Any) -> None:
    data = io.BytesIO()
    with (
        zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as out,
        out.open("conversations.json", "w") as member,
    ):
        for _ in range(300):
            member.write(b" " * 2**20)
    with pytest.raises(KvchatError, match="would unpack to 314,572,800 bytes"):
        read(data.getvalue())


@pytest.mark.parametrize(
    "hostile",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"messages": [' + "9" * 5_000 + "]}",
        '{"messages": "\\u12"}',
        '{"messages": "\x00"}',
        '{"messages": NaN}x',
        "[1, 2",
    ],
    ids=lambda hostile: hostile[:14],
)
def test_a_hostile_line_spoils_no_other(read: Any, hostile: str) -> None:
    first, second, third = read(f'{{"a": 1}}\n{hostile}\n{{"b": 2}}\n')
    assert (first, third) == ((1, {"a": 1}), (3, {"b": 2}))
    assert isinstance(second, BadRecord)
    assert len(second.reason) < 100
