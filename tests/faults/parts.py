"""The parts of a campaign, in the order in which they run."""

from __future__ import annotations

from faults import (
    agents,
    archives,
    clock,
    control,
    damage,
    disks,
    inputs,
    kills,
    large,
    moments,
    ranks,
    rewards,
    sandbox,
    secrets,
    server,
    signals,
    spot,
    templates,
    watch,
    writers,
)

PARTS = {
    part.name: part
    for part in (
        kills.PART,
        moments.PART,
        ranks.PART,
        writers.PART,
        damage.PART,
        archives.PART,
        disks.PART,
        signals.PART,
        clock.PART,
        rewards.PART,
        agents.PART,
        secrets.PART,
        sandbox.PART,
        server.PART,
        watch.PART,
        control.PART,
        spot.PART,
        templates.PART,
        large.PART,
        inputs.PART,
    )
}
