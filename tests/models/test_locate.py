"""From names and paths to files, over stores laid out as their owners lay them out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvchat.engine.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from kvchat.models import catalog
from kvchat.models.locate import kind_of, list_models, locate, require

GGUF = b"GGUF" + bytes(60)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder in which all stores are looked for."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "kvchat"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


def put(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_folder(path: Path) -> Path:
    put(path / "config.json", b"{}")
    put(path / "model.safetensors", bytes(32))
    return path


def put_ollama(root: Path, name: str, blob: bytes = GGUF, **changes: object) -> Path:
    digest = "sha256:" + "ab" * 32
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": digest,
        "size": len(blob),
        **changes,
    }
    other = {"mediaType": "application/vnd.ollama.image.template", "digest": "x", "size": 1}
    manifest = json.dumps({"layers": [other, layer]}).encode()
    put(root / "manifests" / name, manifest)
    return put(root / "blobs" / digest.replace(":", "-"), blob)


def test_an_empty_disk_has_no_models(home: Path) -> None:
    assert list_models() == []
    assert locate("smollm2") is None
    assert locate("") is None
    assert locate("a\0b") is None
    assert locate("x/" * 3000) is None


def test_paths(home: Path) -> None:
    file = put(home / "work" / "my.gguf")
    folder = put_folder(home / "work" / "some" / "model")
    assert locate(str(file)) == file
    assert locate("my.gguf") == Path("my.gguf")
    assert locate("~/work/my.gguf") == file
    assert locate("some/model") == Path("some/model")
    assert locate(f"{folder}{os.sep}") == folder
    assert locate("no/such/model") is None
    assert (kind_of(file), kind_of(folder)) == ("gguf", "folder")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2", "SmolLM2-135M-Instruct.Q4_1.gguf"])
def test_a_catalogue_model_is_found_by_alias_and_file(home: Path, name: str) -> None:
    entry = catalog.find("smollm2")
    assert entry is not None
    file = put(home / "kvchat" / "models" / entry.file)
    put_folder(home / "work" / "smollm2")
    assert locate(name) == file
    assert [(model.name, model.source) for model in list_models()] == [("smollm2", "kvchat")]


def test_an_alias_never_means_a_stray_folder(home: Path) -> None:
    put(home / "work" / "smollm2" / "notes.txt")
    assert locate("smollm2") is None


def test_our_folder(home: Path) -> None:
    models = home / "kvchat" / "models"
    mine = put(models / "mine.gguf")
    deep = put(models / "org" / "name" / "deep-q8_0.gguf")
    folder = put_folder(models / "org" / "full")
    put(models / ".partial" / "x" / "half.gguf")
    put(models / "empty.gguf", b"")
    put(models / "mmproj-mine.gguf")
    put(models / "big-00002-of-00003.gguf")
    assert {model.name for model in list_models()} == {"mine", "org/name/deep-q8_0", "org/full"}
    assert locate("mine") == locate("MINE.gguf") == mine
    assert locate("deep-q8_0") == locate("org/name") == deep
    assert locate("org/full") == folder
    assert {model.name: model.bytes for model in list_models()}["org/full"] == 32


def test_the_hub_cache_gives_the_newest_snapshot(home: Path) -> None:
    repo = home / ".cache" / "huggingface" / "hub" / "models--org--name"
    old, new = (put_folder(repo / "snapshots" / commit) for commit in ("fff", "000"))
    os.utime(old, (1, 1))
    assert locate("org/name") == new
    cut = put_folder(repo.with_name("models--org--cut") / "snapshots" / "1")
    (cut / "model-2.safetensors").symlink_to("../../blobs/missing")
    assert locate("org/cut") is None
    file = put(repo.with_name("models--org--g") / "snapshots" / "1" / "x-q4_0.gguf")
    assert locate("org/g/x-q4_0.gguf") == locate("org/g") == file


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", ""), ("XDG_CACHE_HOME", "")]
)
def test_the_hub_cache_can_be_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    below = "huggingface/hub" if variable == "XDG_CACHE_HOME" else below
    monkeypatch.setenv(variable, str(home / "else"))
    folder = put_folder(home / "else" / below / "models--o--n" / "snapshots" / "1")
    assert locate("o/n") == folder


@pytest.mark.parametrize("store", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studio(home: Path, store: str) -> None:
    file = put(home / store / "org" / "repo" / "a-Q4_K_M.gguf")
    assert locate("a-q4_k_m") == locate("org/repo/a-Q4_K_M.gguf") == file
    assert list_models()[0].source == "LM Studio"


def test_llama_cpp(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(home / "lc"))
    file = put(home / "lc" / "org_repo_a.gguf")
    assert locate("org_repo_a") == file


def test_ollama(home: Path) -> None:
    root = home / ".ollama" / "models"
    blob = put_ollama(root, "registry.ollama.ai/library/llama3.2/1b")
    assert [(model.name, model.bytes) for model in list_models()] == [("llama3.2:1b", len(GGUF))]
    assert locate("llama3.2:1b") == blob
    assert kind_of(blob) == "gguf"


@pytest.mark.parametrize(
    ("manifest", "name"),
    [
        ("registry.ollama.ai/library/phi/latest", "phi"),
        ("registry.ollama.ai/me/phi/q8", "me/phi:q8"),
        ("hf.co/org/repo/Q4_K_M", "hf.co/org/repo:Q4_K_M"),
    ],
)
def test_ollama_names(home: Path, manifest: str, name: str) -> None:
    blob = put_ollama(home / ".ollama" / "models", manifest)
    assert locate(name) == blob


@pytest.mark.parametrize(
    "break_it",
    [
        lambda root: put(root / "manifests/r/l/m/t", b"{"),
        lambda root: put(root / "manifests/r/l/m/t", b"[" * 100_000),
        lambda root: put(root / "manifests/r/l/m/t", b"\xff\xfe"),
        lambda root: put(root / "manifests/r/l/m/t", b'{"layers": 3}'),
        lambda root: put(root / "manifests/r/l/m/t", b'{"layers": [{}]}'),
        lambda root: put_ollama(root, "r/l/m/t", size=1 << 40),
        lambda root: put_ollama(root, "r/l/m/t", digest="sha256:../../secret"),
        lambda root: put_ollama(root, "r/l/m/t", digest=["sha256"]),
    ],
)
def test_broken_ollama_manifests_are_skipped(
    home: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "o"))
    good = put_ollama(home / "o", "registry.ollama.ai/library/good/latest")
    break_it(home / "o")
    assert [(m.name, m.path) for m in list_models()] == [("good:latest", good)]


@pytest.mark.parametrize(
    ("files", "name", "error", "said"),
    [
        ({"a.gguf": b""}, "a.gguf", ModelFileError, "is empty"),
        ({"a.gguf": b"PK\3\4"}, "a.gguf", ModelFileError, "not a GGUF file"),
        ({"a.safetensors": b"x"}, "a.safetensors", UnsupportedModelError, "config.json"),
        ({"a.txt": b"x"}, "./a.txt", UnsupportedModelError, "not a model"),
        ({"a.pt": b"x"}, "a.pt", UnsupportedModelError, "runs? any code"),
        (
            {"d/config.json": b"{}", "d/pytorch_model.bin": b"x"},
            "./d",
            UnsupportedModelError,
            "safe",
        ),
        ({"d/model.safetensors": b"x"}, "./d", ModelFileError, "no config.json"),
        ({"d/config.json": b"{}"}, "./d", ModelFileError, "no .safetensors weights"),
        ({"d/x.gguf": GGUF}, "./d", ModelFileError, "x.gguf"),
        ({"d/readme": b""}, "d", ModelFileError, "not a model folder"),
    ],
)
def test_what_is_no_model_is_explained(
    home: Path, files: dict[str, bytes], name: str, error: type[Exception], said: str
) -> None:
    for file, content in files.items():
        put(home / "work" / file, content)
    with pytest.raises(error, match=said):
        locate(name)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_explained(home: Path) -> None:
    put(home / "work" / "a.gguf").chmod(0)
    with pytest.raises(ModelFileError, match="permission denied"):
        locate("a.gguf")


def test_a_denied_read_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home / "work" / "a.gguf")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ModelFileError, match="permission denied"):
        locate("a.gguf")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2", "`kvchat pull smollm2` fetches it"),
        ("smolm2", "Did you mean smollm2"),
        ("qqqqq", "`kvchat models`"),
        ("org/name", "`kvchat pull org/name`"),
        ("./name/x.gguf", "There is no file"),
    ],
)
def test_require_says_what_to_do(home: Path, name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        require(name)
    assert said in str(caught.value)


def test_require_finds_what_locate_finds(home: Path) -> None:
    file = put(home / "kvchat" / "models" / "mine.gguf")
    assert require("mine") == file


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_and_not_waited_for(home: Path) -> None:
    os.mkfifo(home / "pipe.gguf")
    with pytest.raises(UnsupportedModelError, match="no regular file"):
        locate(str(home / "pipe.gguf"))


def test_homes_that_do_not_exist_hold_no_models(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "LLAMA_CACHE", "OLLAMA_MODELS", "KVCHAT_DATA_DIR"):
        monkeypatch.setenv(name, "~nobody-is-called-so/models")
    assert list_models() == []
    assert locate("~nobody-is-called-so/x.gguf") is None
