"""Memory and time of a run, predicted from its config, without a GPU and without weights.

| file | what |
|---|---|
| `calibration.py` | GPUs, and every constant that was measured: the one place to correct |
| `shape.py` | the sizes of a model, from its config.json or a named shape |
| `workload.py` | what one step computes: samples, lengths, micro-batches |
| `settings.py` | the settings of a run that decide memory and time |
| `layer_bytes.py`, `memory.py` | bytes, counted from the code that allocates them; what each phase holds at its highest |
| `decoding.py`, `timing.py` | seconds of each stage |
| `plan.py`, `proposal.py` | all of it for one config; better settings, and what to change where something does not fit |
| `checkpointing_choice.py` | whether a worker recomputes activations, where the config says auto |
| `measured.py` | what a run measured, beside the prediction |

Nothing here imports torch.
"""
