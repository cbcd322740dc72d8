#!/bin/bash
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}

# {{ request.kind }} {{ request.name }}: written by `posttrain launch`; docs/slurm.md
{% for line in request.profile.slurm.setup %}
{{ line }}
{% endfor %}
{% for name, value in variables.items() %}
export {{ name }}={{ quote(value) }}
{% endfor %}
export POSTTRAIN_HEAD_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export POSTTRAIN_RAY_PORT=$(({{ first_port }} + SLURM_JOB_ID * 2 % {{ num_ports }}))
export POSTTRAIN_CONTROL_PORT=$((POSTTRAIN_RAY_PORT + 1))

{{ step }}
code=$?
case $code in
  {{ ended }}) ;;  # done, bad input, no progress
  {{ saved }}) scontrol requeue "$SLURM_JOB_ID" ;;  # interrupted: goes on from its checkpoint
  *) crashes={{ quote(folder) }}/crashes-$SLURM_JOB_ID; echo "$code" >> "$crashes"
     [ "$(wc -l < "$crashes")" -le {{ max_restarts }} ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
