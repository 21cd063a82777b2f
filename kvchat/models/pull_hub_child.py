"""The process that talks to the Hugging Face Hub: `python pull_hub_child.py REQUEST ANSWER`.

It imports nothing of kvchat, and kvchat nothing of the Hub's library: a download is a process
that can be ended at any moment. Both arguments name JSON files. The process ends when its
standard input does, so that it never outlives the one that asked.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def list_files(repo: str, revision: str | None) -> dict[str, Any]:
    """The newest commit of a revision and its files as (name, bytes, SHA-256 if stored)."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = [
        (file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    ]
    return {"commit": info.sha, "files": files}


def get_files(repo: str, commit: str, folder: str, files: list[tuple[str, int, bool]]) -> None:
    """Download files given as (name, bytes, may be resumed), going on where the last try ended."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    for name, size, resumable in files:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            _wait_for_others(file)
            if not resumable or file.tell() > size:
                file.truncate(0)
            if file.tell() < size:
                url = hf_hub_url(repo, name, revision=commit)
                headers = build_hf_headers()
                http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)


def _wait_for_others(file: IO[bytes]) -> None:
    """Wait until no other process writes the file: one whose parent was killed needs a moment."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0, os.SEEK_END)


_ACTIONS: dict[str, Callable[..., Any]] = {"list": list_files, "get": get_files}


def main(request_path: str, answer_path: str) -> int:
    """Carry out one request and write `{"answer": …}` or a description of the failure."""
    request = json.loads(Path(request_path).read_text("utf-8"))
    try:
        answer = {"answer": _ACTIONS[request.pop("action")](**request)}
    except Exception as error:
        answer = {
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "errno": getattr(error, "errno", None),
            "text": str(error),
        }
    Path(answer_path).write_text(json.dumps(answer), "utf-8")
    return 0


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(*sys.argv[1:]))
