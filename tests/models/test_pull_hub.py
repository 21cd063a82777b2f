"""Downloads from the Hub: its real library over a server on this machine."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_hub import COMMIT, Hub, serve
from pull_helpers import MODEL, contents, isolated_models, make_entry

import kvchat
from kvchat.engine.errors import DownloadError, UnsupportedModelError
from kvchat.models import pull_hub_child
from kvchat.models.locate import locate
from kvchat.models.pull import PullProgress, pull
from kvchat.models.pull_hub import HubFile, HubName, choose, parse
from kvchat.models.pull_staging import SourceError


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder; no source can be reached."""
    return isolated_models(tmp_path, monkeypatch)


@pytest.fixture
def hub(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub that downloads go to."""
    with serve() as state:
        monkeypatch.setenv("HF_ENDPOINT", state.url)
        yield state


def test_a_file_from_the_hub(hub: Hub, models: Path) -> None:
    hub.repos["org/name"] = {"a-Q4_K_M.gguf": MODEL, "a-Q8_0.gguf": b"GGUF2", "README.md": b"#"}
    seen: list[PullProgress] = []
    path = pull("org/name", progress=seen.append)
    assert path == models / "org" / "name" / "a-Q4_K_M.gguf"
    assert path.read_bytes() == MODEL
    assert contents(models) == ["org/name/a-Q4_K_M.gguf"]
    assert seen[-1] == PullProgress(len(MODEL), len(MODEL), "checking")
    assert locate("org/name") == path
    assert pull("https://huggingface.co/org/name/blob/main/a-Q8_0.gguf").read_bytes() == b"GGUF2"
    before = len(hub.requests)
    assert pull("org/name/a-Q8_0.gguf").name == "a-Q8_0.gguf"
    assert len(hub.requests) == before


def test_a_folder_from_the_hub(hub: Hub, models: Path) -> None:
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{ }",
        "model-00001-of-00002.safetensors": b"1" * 3000,
        "model-00002-of-00002.safetensors": b"2" * 2000,
        "pytorch_model.bin": b"pickle",
        "original/model.safetensors": b"again",
        "consolidated.safetensors": b"again",
        "README.md": b"#",
    }
    hub.repos["org/full"] = files
    path = pull("org/full")
    assert path == models / "org" / "full"
    assert contents(path) == sorted(list(files)[:4])
    assert all((path / name).read_bytes() == files[name] for name in contents(path))
    assert locate("org/full") == path
    assert list(models.iterdir()) == [models / "org"]


def test_the_hub_stands_in_for_pip(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_entry(monkeypatch, None, revision=COMMIT)
    hub.repos["org/tiny-GGUF"] = {"tiny.gguf": MODEL}
    assert pull("tiny") == models / "tiny.gguf"
    assert (models / "tiny.gguf").read_bytes() == MODEL
    assert contents(models) == ["tiny.gguf"]


def test_the_hubs_copy_must_be_the_same_file(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_entry(monkeypatch, None)
    hub.repos["org/tiny-GGUF"] = {"tiny.gguf": MODEL[::-1]}
    with pytest.raises(DownloadError, match="another file under that name"):
        pull("tiny")
    assert not [name for name in contents(models) if name.endswith("gguf")]


def test_a_damaged_download_is_not_kept(hub: Hub, models: Path) -> None:
    hub.repos["org/name"] = {"a.gguf": MODEL}
    hub.served["a.gguf"] = MODEL[:-1] + b"!"
    with pytest.raises(DownloadError, match="did not arrive as it was published"):
        pull("org/name")
    assert not [name for name in contents(models) if name.endswith("gguf")]
    hub.served.clear()
    assert pull("org/name").read_bytes() == MODEL


@pytest.mark.parametrize("killed", [True, False])
def test_a_cut_off_download_goes_on_where_it_stopped(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(kvchat.__file__).parents[1]))
    # The Hub's library writes 10 MiB at a time.
    large = b"GGUF" + bytes(12 << 20)
    hub.repos["org/name"] = {"a.gguf": large}
    hub.stalled = True
    script = "from kvchat.models.pull import pull; pull('org/name')"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as first:
        part = models / ".partial" / "org--name--all" / "hub" / "files" / "a.gguf"
        while not (part.exists() and part.stat().st_size) and first.poll() is None:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL if killed else signal.SIGINT)
    assert (models / ".partial" / "org--name--all.lock").exists() == killed
    assert not (models / "org").exists()
    with part.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # once the process that wrote it has ended as well
    received = part.stat().st_size
    assert 0 < received < len(large)
    hub.stalled = False
    hub.requests.clear()
    assert pull("org/name").read_bytes() == large
    spans = [span for path, span in hub.requests if path.endswith("a.gguf")]
    assert spans == [f"bytes={received}-"]
    assert contents(models) == ["org/name/a.gguf"]


def test_a_download_does_not_outlive_who_asked(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/name"] = {"a.gguf": bytes(12 << 20)}
    hub.stalled = True
    request = {"action": "get", "repo": "org/name", "commit": COMMIT, "folder": str(tmp_path)}
    (tmp_path / "request").write_text(
        json.dumps({**request, "files": [("a.gguf", 12 << 20, True)]})
    )
    command = [sys.executable, pull_hub_child.__file__]
    with subprocess.Popen(
        [*command, str(tmp_path / "request"), str(tmp_path / "answer")], stdin=subprocess.PIPE
    ) as child:
        while not (tmp_path / "a.gguf").exists() and child.poll() is None:
            time.sleep(0.05)
        assert child.poll() is None and child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/absent", "no public repository org/absent"),
        ("org/gated", "accepted first: do so at https://huggingface.co/org/gated"),
        ("org/ill", "the Hub refused"),
        ("org/name/b.gguf", "has no file b.gguf; it has a.gguf"),
        ("org/name:q8_0", "say which file of org/name"),
    ],
)
def test_the_hubs_refusals_are_explained(hub: Hub, models: Path, name: str, said: str) -> None:
    hub.repos["org/name"] = {"a.gguf": MODEL}
    hub.refusals = {"org/gated": (403, "GatedRepo"), "org/ill": (400, "")}
    with pytest.raises(DownloadError) as caught:
        pull(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_is_explained(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match="no network connection to the Hub"):
        pull("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        pull("org/name")
    assert list(models.iterdir()) == []


def files(*names: str) -> list[HubFile]:
    return [HubFile(name, 1, None) for name in names]


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("org/name", HubName(repo="org/name")),
        ("hf:org/name:Q4_K_M", HubName(repo="org/name", quant="Q4_K_M")),
        ("hf.co/org/name/sub/x.gguf", HubName(repo="org/name", file="sub/x.gguf")),
        (
            "https://huggingface.co/o/n/resolve/main/x.gguf?download=true",
            HubName(repo="o/n", file="x.gguf"),
        ),
        ("https://example.org/o/n", None),
        ("name", None),
        ("/etc/passwd", None),
        ("org/name/..\\x", None),
    ],
)
def test_hub_names(name: str, parsed: HubName | None) -> None:
    assert parse(name) == parsed


@pytest.mark.parametrize(
    ("wanted", "offered", "chosen"),
    [
        (HubName(repo="o/n"), ["x-q8_0.gguf", "x-Q4_K_M.gguf", "x-q2_k.gguf"], ["x-Q4_K_M.gguf"]),
        (HubName(repo="o/n"), ["x-q2_k.gguf"], ["x-q2_k.gguf"]),
        (HubName(repo="o/n", quant="Q4_K"), ["x-Q4_K.gguf", "x-Q4_K_M.gguf"], ["x-Q4_K.gguf"]),
        (HubName(repo="o/n", quant="f16"), ["x-f16.gguf", "x-bf16.gguf"], ["x-f16.gguf"]),
        (HubName(repo="o/n", file="X.gguf"), ["sub/x.gguf"], ["sub/x.gguf"]),
        (
            HubName(repo="o/n"),
            ["config.json", "m.safetensors", "m.bin", "../evil.json", "/abs.json", "x.gguf"],
            ["config.json", "m.safetensors"],
        ),
        (HubName(repo="o/n", quant="q4_0"), ["config.json", "m.safetensors", "x-q4_0.gguf"],
         ["x-q4_0.gguf"]),
    ],
)  # fmt: skip
def test_choosing(wanted: HubName, offered: list[str], chosen: list[str]) -> None:
    assert [file.name for file in choose(wanted, files(*offered))] == chosen


@pytest.mark.parametrize(
    ("wanted", "offered", "error", "said"),
    [
        (HubName(repo="o/n"), ["pytorch_model.bin"], UnsupportedModelError, "pickled"),
        (HubName(repo="o/n", file="m.pth"), ["m.pth"], UnsupportedModelError, "pickled"),
        (HubName(repo="o/n"), ["x-00001-of-00002.gguf"], SourceError, "in parts"),
        (HubName(repo="o/n"), ["a.gguf", "b.gguf"], SourceError, "say which file"),
        (HubName(repo="o/n"), ["README.md"], SourceError, "holds no GGUF"),
        (HubName(repo="o/n"), [], SourceError, "holds no GGUF"),
    ],
)
def test_nothing_to_choose(
    wanted: HubName, offered: list[str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        choose(wanted, files(*offered))
