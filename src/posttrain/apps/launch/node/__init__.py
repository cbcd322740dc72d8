"""`posttrain node`, the first process of every pod: a member of the run's gang.

| file | what |
|---|---|
| `contract.py` | the variables that manifests set in a pod, and its rank (decision 40) |
| `checks.py` | GPUs, EFA devices, shared memory, file system: before anything is started |
| `notices.py` | notices of the metadata service of AWS or Google Cloud that this machine will end |
| `control.py`, `session.py` | the connection of each member to rank 0; how both prove the secret of the run |
| `member.py`, `head.py` | what every member does, with its processes; what rank 0 does beside it |
| `driver.py` | the driver of a RayJob, beside the head |

Nothing here imports torch or Ray: Ray is started as a command.
"""
