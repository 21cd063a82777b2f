"""Build the kernels, check them, put them in place.

Their folder appears in one step and only with kernels that agreed with torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.cpp_extension import load

from kvchat.engine.native import CHECKED, LIBRARY, SOURCE, building, ninja, note_failure

FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]

UNFINISHED = ".building-"
"""How the names of folders begin in which something is being built."""

TOLERANCE = 1e-3
"""Of the largest result; activations of 14 bits lose a fifth of it at most."""


def build(folder: Path) -> None:
    """Compile into `folder`, unless another process has done so meanwhile.

    What goes wrong is remembered beside it, for `native.failure`.

    Raises:
        RuntimeError: the compiler refuses, or what it made does not compute what torch does.
        OSError: there is no place to write to.
        BusyError: another process is building.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with building(folder.parent):
        for left in folder.parent.glob(f"{UNFINISHED}*"):  # by a process that was ended
            shutil.rmtree(left, ignore_errors=True)
        if (folder / CHECKED).exists():
            return
        try:
            _build(folder)
        except RuntimeError as error:
            note_failure(folder, cause(error))
            raise
        note_failure(folder, None)


def _build(folder: Path) -> None:
    tools = Path(ninja() or "").parent
    os.environ["PATH"] = os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=UNFINISHED) as place:
        load(
            LIBRARY,
            [str(SOURCE)],
            extra_cflags=FLAGS,
            build_directory=place,
            is_python_module=False,
        )
        # A processor that does not know an instruction ends the process and leaves this word.
        note_failure(folder, "what the compiler made ended the process that tried it")
        check()
        for leftover in Path(place).iterdir():
            if leftover.suffix != ".so":
                leftover.unlink()
        Path(place, CHECKED).touch()
        os.chmod(place, 0o755)
        os.rename(place, folder)
        os.mkdir(place)  # for the clean-up to find


def cause(error: Exception) -> str:
    """Find the line of a compiler's tale that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower()]
    return (telling or lines[-1:] or [type(error).__name__])[0][:200]


def check() -> None:
    """Compare the loaded kernels with torch on random weights of every class and many shapes."""
    generator = torch.Generator().manual_seed(0)
    for bits, minima in ((4, False), (4, True), (5, False), (5, True), (6, False), (8, False)):
        for rows, inputs in ((1, 32), (16, 64), (37, 160), (576, 576), (100, 1536)):
            what = f"of {bits} bits, {rows} × {inputs}{', with minima' if minima else ''}"
            q = torch.randint(0, 2**bits, (rows, inputs), generator=generator).to(torch.uint8)
            group = 16 if bits == 6 else 32
            scale = torch.rand(rows, inputs // group, generator=generator) / 100 + 0.001
            scale = scale.half().float()
            lowest = torch.randn(rows, inputs // 32, generator=generator).half().float() / 10
            weight = q.float() if minima else q.float() - 2 ** (bits - 1)
            weight = weight.view(rows, -1, group) * scale[..., None]
            if minima:
                weight += lowest[..., None].half().float()
            weight = weight.flatten(1)
            blocks = torch.ops.kvchat.pack(q, scale, lowest if minima else None, bits)
            ids = torch.arange(rows)
            held = torch.ops.kvchat.embed(blocks, bits, minima, rows, ids)
            _compare(f"weights {what}", held, weight, 1e-6)
            x = torch.randn(15, inputs, generator=generator)  # 8, 4, 2 and 1 rows at a time
            found = torch.ops.kvchat.linear(x, blocks, bits, minima, rows, 2)
            _compare(f"product {what}", found, x @ weight.T, TOLERANCE)


def _compare(what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    gap = (found - wanted).abs().max() / wanted.abs().max()
    if not gap <= tolerance:
        raise RuntimeError(f"the {what} is off by {gap:.1e}")
