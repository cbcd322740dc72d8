"""A checkpoint's weights to a Hugging Face folder, with the arguments of NeMo RL's script of the same name.

    python examples/converters/convert_dcp_to_hf.py --config results/grpo/step_60/config.yaml \
        --dcp-ckpt-path results/grpo/step_60/policy/weights/ --hf-ckpt-path results/grpo/hf

`posttrain convert` does the same and more. A LoRA adapter is merged, because the result is to be a whole model.
"""

import sys

from posttrain.cli.convert_command import run_as_script

if __name__ == "__main__":
    sys.exit(run_as_script())
