"""Print the CPU capabilities of torch that this machine has beside its best one, one per line, for `make invariants`.

torch chooses its kernels by capability, and kernels with other vector widths add up in another order. A value of
ATEN_CPU_CAPABILITY below the best one makes it use the kernels that a lesser CPU would get. torch does not check
whether the CPU has the instructions, so nothing above the best one may be printed.
"""

from __future__ import annotations

import os

_ON_X86 = ("default", "avx2", "avx512")  # from the least to the best


def below(best: str) -> tuple[str, ...]:
    """Values for ATEN_CPU_CAPABILITY on a CPU whose best capability is `best`, as torch names it."""
    best = best.lower()
    if best in _ON_X86:
        return _ON_X86[: _ON_X86.index(best)]
    return ("default",)


if __name__ == "__main__":
    os.environ.pop("ATEN_CPU_CAPABILITY", None)  # read when torch is imported
    import torch

    print(*below(torch.backends.cpu.get_cpu_capability()), sep="\n")
