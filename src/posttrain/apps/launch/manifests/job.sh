#!/bin/bash
#SBATCH --job-name={{ request.name }}
#SBATCH --nodes={{ request.num_nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={{ cores }}
{% if request.gpus_per_node %}
#SBATCH --gpus-per-node={{ request.gpus_per_node }}
{% endif %}
{% for name in ("time", "partition", "account", "qos") if slurm[name] %}
#SBATCH --{{ name }}={{ words([slurm[name]]) }}
{% endfor %}
#SBATCH --signal=TERM@{{ warning_s }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={{ words([folder]) }}/output-%j.txt
#SBATCH --chdir={{ words([folder]) }}
{% for option in slurm.sbatch_options %}
#SBATCH {{ option }}
{% endfor %}

# {{ request.kind }} {{ request.name }}: written by `posttrain launch`; docs/slurm.md
{% for line in slurm.setup %}
{{ line }}
{% endfor %}
{% for name, value in variables.items() %}
export {{ name }}={{ words([value]) }}
{% endfor %}
export POSTTRAIN_HEAD_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export POSTTRAIN_RAY_PORT=$(({{ ports[0] }} + SLURM_JOB_ID * 2 % {{ ports[1] }}))
export POSTTRAIN_CONTROL_PORT=$((POSTTRAIN_RAY_PORT + 1))

{% set tasks = "--nodes=%d --ntasks=%d --ntasks-per-node=1" | format(request.num_nodes, request.num_nodes) %}
srun {{ tasks }} --cpus-per-task={{ cores }} --kill-on-bad-exit=0 {{ words(slurm.srun_options + command) }}
code=$?
case $code in
  {{ "%d|%d|%d" | format(code.DONE, code.BAD_INPUT, code.NO_PROGRESS) }}) ;;  # done, bad input, no progress
  {{ "%d" | format(code.SAVED) }}) scontrol requeue "$SLURM_JOB_ID" ;;  # interrupted: goes on from its checkpoint
  *) crashes={{ words([folder]) }}/crashes-$SLURM_JOB_ID; echo "$code" >> "$crashes"
     [ "$(wc -l < "$crashes")" -le {{ max_restarts }} ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
