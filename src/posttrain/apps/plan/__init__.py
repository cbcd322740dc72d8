"""Memory and time of a run, predicted from its config, without a GPU and without weights.

| file | what |
|---|---|
| `calibration.py` | GPUs, and the measured constants of timing |
| `workload.py` | what one step computes: samples, lengths, micro-batches |
| `phases.py` | peak memory of each phase and the KV cache. The formula is `policy/memory`: ranks ask it as well |
| `decoding.py`, `timing.py` | seconds of each stage |
| `simulation.py`, `split.py` | steps with rounds and engines as discrete events; splits of GPUs |
| `plan.py`, `proposal.py` | the plan of one config, and its cost; better settings, and remedies |
| `measured.py` | what a run measured, next to the prediction |

Nothing here imports torch but `simulation.py`, which ends rounds by the quota of `types.py`.
"""
