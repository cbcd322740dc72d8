"""What the finding of each rule means and what to do about it. `posttrain doctor --rules` and docs/troubleshooting.md show it."""

ADVICE = {
    "kl-runaway": (
        "The policy moves away from the starting model faster than the reward justifies. It soon writes text that the"
        " starting model would never write. Lower the learning rate if it began within the first steps; raise "
        "`loss_fn.reference_policy_kl_penalty` if it crept up."
    ),
    "entropy-collapse": (
        "The policy has become sure of every token: the answers of a group are alike, so there is nothing left to "
        "compare. While validation still rises this is how learning a simple task looks. Otherwise lower the learning"
        " rate, add a KL penalty, and go back to a checkpoint from before the fall."
    ),
    "no-signal": (
        "GRPO learns from differences within a group. If all answers of a group have the same reward, the group "
        "teaches nothing, and the loss is 0. Read the answers: is the temperature 0, are they cut off, is the reward "
        "constant, are the prompts too easy or too hard? `posttrain rewards test` tries a reward on answers of known "
        "worth. `grpo.use_dynamic_sampling=true` samples on until there are enough groups with a signal; "
        "`posttrain data screen` keeps the prompts that are neither too easy nor too hard."
    ),
    "wrong-template": (
        "The prompts have a chat template that the model was not trained with, so it does not know where to stop. Use"
        " the model's own: `policy.tokenizer.chat_template=default`."
    ),
    "truncated": (
        "Answers reach `policy.generation.max_new_tokens` and are cut off before their end, where most rewards look. "
        "Allow longer answers. If few were cut off at the start, the policy has learnt not to stop: lower the "
        "learning rate, or let `grpo.reward_shaping` charge for length."
    ),
    "length-explosion": (
        "Answers have more than doubled. For reasoning that is often wanted; elsewhere the reward pays for length. "
        "Read the longest answers. `grpo.reward_shaping.enabled=true` charges for length."
    ),
    "reward-flat": (
        "The run has learnt nothing in its last fifth, and little before. If the reward never rose, raise the "
        "learning rate, take more answers per prompt, or easier prompts. If it fell, lower the learning rate."
    ),
    "reward-collapse": (
        "The reward was twice as high before. The policy is damaged: go back to a checkpoint from before the fall, "
        "and resume with a lower learning rate."
    ),
    "reward-hacking": (
        "The reward rises, and what you want does not. The policy has found something that the reward pays for. Read "
        "the answers with the highest rewards, and change the reward so that it does not pay for that; a KL penalty "
        "slows it down."
    ),
    "unscored": (
        "The reward function raised, timed out or gave no number. Those answers are left out of training. The reasons"
        " are counted in `unscored.jsonl`. Fix the function, or give it more time: `env.NAME.timeout_s`."
    ),
    "sampler-mismatch": (
        "The sampler gives its tokens other probabilities than the trainer does, so the gradient is that of another "
        "policy. Turn the correction on (`loss_fn.use_importance_sampling_correction=true`), or sample in the "
        "precision of the trainer."
    ),
    "off-policy": (
        "The answers are from weights that are too old, so few of their tokens count. Allow less age "
        "(`grpo.async_grpo.max_trajectory_age_steps`), lower the learning rate, or make fewer updates per step."
    ),
    "clip-fraction": (
        "Many tokens are outside the clip: the updates of one step go further than it allows. Lower the learning "
        "rate, or make fewer updates per step with a larger `policy.train_global_batch_size`."
    ),
    "generation-slowing": (
        "Sampling takes longer per token than at the start, at equal length. Usually the key-value cache is short of "
        "memory and answers are preempted: `policy.generation.native_cfg.gpu_memory_utilization`, or fewer answers at"
        " once."
    ),
    "both-fall": (
        "DPO widens the gap by making the rejected answers unlikely, and takes the chosen ones along. Harmless while "
        "small beside the gap. Otherwise keep the chosen ones likely: `dpo.sft_loss_weight=0.1`, or lower the "
        "learning rate."
    ),
    "too-easy": (
        "All pairs are ranked rightly after a few steps. Chosen and rejected can be told apart by something simple, "
        "such as length, or the same pairs repeat. `posttrain data inspect` shows both."
    ),
    "memorised": (
        "Training pairs are ranked rightly and held-out ones are not: the model has memorised the pairs. Fewer "
        "epochs, more data, no duplicates."
    ),
    "equal-pairs": (
        "Chosen and rejected are the same text, so nothing can be learnt from them. Remove them from the data."
    ),
    "worse-than-chance": (
        "The loss is above that of guessing, step after step: the learning rate is far too high, or chosen and "
        "rejected are exchanged."
    ),
    "not-learning": (
        "At the end the model ranks pairs no better than by guessing. Raise the learning rate or train longer; check "
        "that chosen and rejected are not exchanged and that the pairs differ in what you care about."
    ),
    "not-finite": (
        "Loss or gradient is infinite or not a number. The update is skipped, and the weights are intact. If it comes"
        " back, lower the learning rate; look for a reward or a row of data with extreme values."
    ),
    "grad-spike": (
        "The gradient is many times its usual size. One spike is clipped and does no harm. Several mean that training"
        " is unstable: lower the learning rate, or warm it up."
    ),
    "grad-dead": (
        "The gradient is zero although there is a signal. Check that weights are trained at all (LoRA's target "
        "modules, frozen layers) and that the learning rate is not 0."
    ),
    "loss-diverges": (
        "The loss is above where it began. Lower the learning rate, and go back to a checkpoint from before."
    ),
    "overfit": (
        "The loss on held-out rows rises while that of training falls. Stop at the step with the lowest validation "
        "loss, take fewer epochs, or more data."
    ),
}
