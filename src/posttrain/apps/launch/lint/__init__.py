"""Checks of Kubernetes manifests, from here or elsewhere, without a cluster.

| file | what |
|---|---|
| `findings.py` | a finding: rule, level, place, value, remedy |
| `reading.py` | pods, Jobs and values inside objects of any shape |
| `core_schemas.py`, `custom_schemas.py` | schemas of Kubernetes itself, and of custom resources with their CEL rules |
| `pod_rules.py`, `device_rules.py`, `job_rules.py`, `volcano_rules.py`, `ray_rules.py` | beyond schemas of workloads |
| `node_rules.py`, `kueue_rules.py`, `storage_rules.py` | the same for what an administrator creates |
| `reference_rules.py` | names of objects in the same files |
| `check.py` | all of it, in order |

An error is what an API server, a webhook or a controller refuses, and what is accepted and cannot work. A warning is what
works and is unwise.
"""
