"""Amounts as Kubernetes writes them: 8, "500m", "1.5Gi"; the sizes that drivers of shared file systems make."""

from __future__ import annotations

import re

FSX, LUSTRE = "fsx.csi.aws.com", "lustre.csi.storage.gke.io"
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_FACTORS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_FACTORS |= {f"{unit}i": 1024 ** (power + 1) for power, unit in enumerate("KMGTPE")}


def quantity(value: object) -> float | None:
    """As a number; None if it is not one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) * _FACTORS[match[2] or ""] if match else None


def is_fsx_size(gib: float) -> bool:
    return gib == 1200 or (gib > 0 and gib % 2400 == 0)


def lustre_step_gib(tier: int) -> int:
    """The least size of Managed Lustre, and the step to the next: the slower the tier, the larger."""
    return 9_000_000 // tier


def is_lustre_size(gib: float, tier: int) -> bool:
    return gib > 0 and gib % lustre_step_gib(tier) == 0
