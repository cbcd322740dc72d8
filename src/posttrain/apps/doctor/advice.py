"""What the finding of each rule means and what to do about it. `posttrain doctor --rules` and docs/troubleshooting.md show it."""

ADVICE = {
    "kl-runaway": (
        "The policy diverges from the starting model, and soon generates text that the starting model would never "
        "generate. If the KL rose within the first steps, lower the learning rate. If it rose slowly, raise "
        "`loss_fn.reference_policy_kl_penalty`."
    ),
    "entropy-collapse": (
        "The policy assigns almost all probability to one token at each position. The answers of a group are nearly "
        "identical, so their rewards and advantages do not differ. While validation still rises, this is normal for a "
        "simple task. Otherwise lower the learning rate, add a KL penalty, and go back to a checkpoint from before "
        "the drop."
    ),
    "no-signal": (
        "GRPO learns from reward differences within a group. If all answers of a group have the same reward, their "
        "advantages are 0 and the group does not contribute to the gradient. Read the answers. Possible causes: "
        "temperature 0, truncated answers, a constant reward, prompts that are too easy or too hard. `posttrain "
        "rewards test` checks a reward on answers with known scores. `grpo.use_dynamic_sampling=true` samples until "
        "there are enough groups with a signal; `posttrain data screen` keeps the prompts that are neither too easy "
        "nor too hard."
    ),
    "wrong-template": (
        "The prompts use a chat template that the model was not trained with, so it may not generate a stop token. "
        "Use the model's own template: `policy.tokenizer.chat_template=default`."
    ),
    "truncated": (
        "Answers reach `policy.generation.max_new_tokens` and are truncated. Most rewards need the end of the answer. "
        "Allow longer answers. If few answers were truncated at the start, the policy has learnt not to stop: lower "
        "the learning rate, or penalise length with `grpo.reward_shaping`."
    ),
    "length-explosion": (
        "The mean answer length has more than doubled. For reasoning tasks that is often intended; otherwise the "
        "reward may favour length. Read the longest answers. `grpo.reward_shaping.enabled=true` penalises length."
    ),
    "reward-flat": (
        "The reward did not rise in the last fifth of the run, and little before. If it never rose, raise the "
        "learning rate, sample more answers per prompt, or use easier prompts. If it fell, lower the learning rate."
    ),
    "reward-collapse": (
        "The reward has fallen to less than half of its best level. Go back to a checkpoint from before the drop, and "
        "resume with a lower learning rate."
    ),
    "reward-hacking": (
        "The reward rises, but other metrics show that the answers get worse: the policy exploits a flaw of the "
        "reward. Read the answers with the highest rewards, and fix the reward. A KL penalty slows the effect down."
    ),
    "unscored": (
        "The reward function raised an exception, timed out or returned no number. These answers are left out of "
        "training. `unscored.jsonl` counts the reasons. Fix the function, or raise its time limit: "
        "`env.NAME.timeout_s`."
    ),
    "sampler-mismatch": (
        "Sampler and trainer compute different probabilities for the sampled tokens, so the gradient is biased. "
        "Enable importance sampling correction (`loss_fn.use_importance_sampling_correction=true`), or sample in the "
        "precision of the trainer."
    ),
    "off-policy": (
        "The answers were sampled with weights that are too old, so the effective sample size is small. Allow a "
        "smaller age (`grpo.async_grpo.max_trajectory_age_steps`), lower the learning rate, or make fewer updates per "
        "step."
    ),
    "clip-fraction": (
        "The ratio of many tokens is outside the clip range: the updates of one step are too large. Lower the "
        "learning rate, or make fewer updates per step with a larger `policy.train_global_batch_size`."
    ),
    "generation-slowing": (
        "Sampling takes longer per token than at the start, at equal length. Usually the KV cache is too small and "
        "answers are preempted: raise `policy.generation.native_cfg.gpu_memory_utilization`, or sample fewer answers "
        "at once."
    ),
    "both-fall": (
        "DPO increases the margin by lowering the probability of the rejected answers, and the probability of the "
        "chosen answers falls with it. This is harmless while the drop is small compared with the margin. Otherwise "
        "add an SFT loss on the chosen answers (`dpo.sft_loss_weight=0.1`), or lower the learning rate."
    ),
    "too-easy": (
        "All pairs are ranked correctly after a few steps. Chosen and rejected answers differ in something simple, "
        "such as length, or the same pairs repeat. `posttrain data inspect` shows both."
    ),
    "memorised": (
        "Training pairs are ranked correctly and held-out pairs are not: the model has memorised the training pairs. "
        "Train for fewer epochs, use more data, remove duplicates."
    ),
    "equal-pairs": (
        "Chosen and rejected answers are identical, so these pairs have no gradient. Remove them from the data."
    ),
    "worse-than-chance": (
        "The loss stays above the loss of random ranking: the learning rate is far too high, or chosen and rejected "
        "are swapped."
    ),
    "not-learning": (
        "At the end of the run the model ranks pairs no better than chance. Raise the learning rate or train longer. "
        "Check that chosen and rejected are not swapped, and that the pairs differ in the property that you want to "
        "train."
    ),
    "not-finite": (
        "Loss or gradient is infinite or NaN. The update is skipped, so the weights are intact. If it happens again, "
        "lower the learning rate, and look for a reward or a data row with extreme values."
    ),
    "grad-spike": (
        "The gradient norm is many times its median. A single spike is clipped and harmless. Several spikes mean that "
        "training is unstable: lower the learning rate, or add warmup."
    ),
    "grad-dead": (
        "The gradient is zero although there is a signal. Check that parameters are trainable (LoRA target modules, "
        "frozen layers) and that the learning rate is not 0."
    ),
    "loss-diverges": (
        "The loss is above its value at the start, or far above its minimum. Lower the learning rate, and go back to "
        "an earlier checkpoint."
    ),
    "overfit": (
        "The validation loss rises while the training loss falls. Stop at the step with the lowest validation loss, "
        "train for fewer epochs, or use more data."
    ),
}
