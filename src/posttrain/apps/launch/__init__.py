"""From the config of a run to Kubernetes: manifests, their lint, what the run costs, and the run itself.

| file | what |
|---|---|
| `machines.yaml`, `nccl.yaml`, `instances.py` | machines: GPUs, fabric, allocatable CPU and memory, prices |
| `launch_request.py` | a run's config and a cluster profile, checked against each other; its ConfigMap |
| `manifests/` | templates of everything below, and of the batch script of Slurm |
| `pod_template.py`, `workloads.py` | the pod; the workload of each scheduler around it; values of Helm |
| `admin_objects.py` | what an administrator creates once |
| `manifest_files.py` | objects from templates; YAML of objects, written to and read from files |
| `quantities.py` | amounts as Kubernetes writes them; sizes of shared file systems |
| `lint/` | checks of manifests, from here or elsewhere, in layers |
| `cost.py` | hours, dollars, interruptions |
| `node/` | `posttrain node`, the first process of every pod |
| `runs.py` | runs in a cluster: phase, attempts, pods by rank; the Protocol of clusters |
| `submit.py` | which cluster a profile names; what a run is and costs before it is submitted; following it |
| `kubernetes_cluster.py`, `cluster_checks.py` | Kubernetes, the only file with its client; what a run needs of it |
| `slurm.py` | a run as a job of Slurm: its batch script, and `sbatch` |
| `ray_jobs.py` | runs as jobs of a long-lived Ray cluster, over Ray's Jobs API |
| `local/` | this machine as a cluster |
| `run_checkpoints.py` | checkpoints of a run, with metrics |

Nothing here imports torch.
"""
