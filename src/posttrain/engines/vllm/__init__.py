"""vLLM as an engine: of `posttrain eval` (`offline.py`), and of a training run, in a process of its own
(`sampler.py`).
"""

from posttrain.engines.vllm.offline import VllmEngine
from posttrain.engines.vllm.requests import allowed_rank, vllm_options

__all__ = ["VllmEngine", "allowed_rank", "vllm_options"]
