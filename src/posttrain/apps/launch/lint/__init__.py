"""Checks of Kubernetes manifests, from here or elsewhere, without a cluster.

| file | what |
|---|---|
| `findings.py` | a finding: rule, level, place, value, remedy |
| `reading.py` | pods, Jobs and values inside objects of any shape |
| `core_schemas.py`, `custom_schemas.py` | schemas of Kubernetes itself, and of custom resources with their CEL rules |
| `rules/*.yaml`, `cel_rules.py` | beyond schemas: rules as rows with expressions of CEL, and what evaluates them |
| `check.py` | all of it, in order, and the rules that no row states |

An error is what an API server, a webhook or a controller refuses, and what is accepted and cannot work. A warning is
what works and is unwise.
"""
