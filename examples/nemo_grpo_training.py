"""GRPO on labelled traces, with the arguments of the training job of a continuous pipeline.

    python examples/nemo_grpo_training.py --data-path=s3://training-data-lake/labeled-dataset/ \
        --output-path=/checkpoints/grpo-run-001 --num-nodes=3 --devices=8 policy.model_name=MODEL

The traces have a `final_reward`; those below 0.5 are left out. Settings of `posttrain grpo` may follow and win, also
under the guide's names: num_iterations, batch_size (prompts of a step), learning_rate, kl_coeff, cliprange, vf_coeff.
GRPO has no value function: with vf_coeff given, PPO trains one.
"""

import argparse
import sys

from posttrain.cli.main import main

SETTINGS = [
    "grpo.max_num_steps=1000",
    "grpo.num_prompts_per_step=32",
    "policy.optimizer.kwargs.lr=1e-5",
    "policy.precision=bfloat16",
    "loss_fn.reference_policy_kl_penalty=0.1",
    "loss_fn.ratio_clip_min=0.2",
    "loss_fn.ratio_clip_max=0.2",
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-path", required=True, help="files of labelled traces: a file, a folder, a pattern or a URL"
    )
    parser.add_argument("--output-path", required=True, help="folder of the run and its checkpoints")
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of each node (default: 1)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of `posttrain grpo`")
    args = parser.parse_intermixed_args()
    traces = {
        "dataset_name": "TraceGroups",
        "data_path": args.data_path,
        "trace_columns": {"reward": "final_reward"},
        "trace_filters": {"min_reward_threshold": 0.5},
    }
    words = [
        f"data.train={traces}",
        f"checkpointing.checkpoint_dir={args.output_path}",
        f"cluster.num_nodes={args.num_nodes}",
        f"cluster.gpus_per_node={args.devices}",
    ]
    settings = [
        f"grpo.num_prompts_per_step={word.partition('=')[2]}" if word.startswith("batch_size=") else word
        for word in args.settings
    ]
    kind = "ppo" if any(word.startswith("vf_coeff=") for word in settings) else "grpo"
    sys.exit(main([kind, *SETTINGS, *words, *settings]))
