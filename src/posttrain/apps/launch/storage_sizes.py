"""Drivers of shared file systems, and the sizes in GiB that they can make."""

from __future__ import annotations

FSX, LUSTRE = "fsx.csi.aws.com", "lustre.csi.storage.gke.io"


def is_fsx_size(gib: float) -> bool:
    return gib == 1200 or (gib > 0 and gib % 2400 == 0)


def lustre_step_gib(tier: int) -> int:
    """The least size of Managed Lustre, and the step to the next: the slower the tier, the larger."""
    return 9_000_000 // tier


def is_lustre_size(gib: float, tier: int) -> bool:
    return gib > 0 and gib % lustre_step_gib(tier) == 0
