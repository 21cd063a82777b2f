"""What this machine computes with."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that decide how fast a model runs here."""

    torch_version: str
    cpu: str
    """Best vector instructions that torch uses, such as AVX512."""
    bfloat16: bool
    """Whether the CPU multiplies bfloat16 itself."""
    cores: int
    threads: int
    """Compute threads torch would use."""
    accelerators: tuple[str, ...]
    """Names of the GPUs, empty when there is none."""


def machine() -> Machine:
    """Look at this machine."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    accelerators = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(cuda)]
    if torch.backends.mps.is_available():
        accelerators.append("mps")
    return Machine(
        torch_version=torch.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(),
        bfloat16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        accelerators=tuple(accelerators),
    )
