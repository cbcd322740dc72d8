gcloud container node-pools create {{ profile.nodes.pool }} \
  --cluster={{ quote(profile.cluster.name or "CLUSTER") }} \
  --machine-type={{ instance.name }} \
  --accelerator=type={{ instance.accelerator }},count={{ instance.gpus }},gpu-driver-version=latest \
  --node-locations={{ profile.nodes.zone or "ZONE" }} \
  --num-nodes=0 --enable-autoscaling --min-nodes=0 \
  --max-nodes={{ profile.nodes.max_nodes }} \
  --no-enable-autorepair{# a repair would end the machine during a run #}
{%- if profile.nodes.capacity == "spot" %} \
  --spot \
  --node-taints=cloud.google.com/gke-spot=true:NoSchedule
{%- endif %}
{%- for name in networks %} \
  --additional-node-network=network={{ "rdma" if name.startswith("rdma") else name }},subnetwork={{ name }}
{%- endfor %}
{%- if profile.nodes.capacity == "spot" and (profile.nodes.grace_s or 0) > 15 %} \
  --system-config-from-file=node-system.yaml

# node-system.yaml (GKE 1.35.0-gke.1171000 or newer)
kubeletConfig:
  shutdownGracePeriodSeconds: 120
  shutdownGracePeriodCriticalPodsSeconds: 15

{%- endif %}

