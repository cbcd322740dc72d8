"""vLLM's side of `decode.py`, in a process of its own: the same prompts, the same sampling, dummy weights of the same
shape.

As vLLM starts by default, but without a tokenizer. Its start contains the making of the weights, which takes seconds;
the import of the package does not count.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decode_job import DecodeJob, Sampled, timed
from machine import GIB
from shapes import shape_of
from workloads import Workload

# Before vLLM is imported; what the caller has set wins. FlashInfer's sampler, which is for top-k and top-p, would be
# compiled at the first use, with a compiler that may be missing.
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def model_folder(name: str, dtype: str, folder: Path) -> Path:
    """The folder `name`, or one with nothing but the config.json of the shape."""
    if Path(name).is_dir():
        return Path(name)
    (folder / "config.json").write_text(json.dumps({**shape_of(name).config(), "torch_dtype": dtype}))
    return folder


class VllmSampling:
    def __init__(self, job: DecodeJob, folder: Path) -> None:
        from vllm import LLM

        self.shares_prompts = any(work.num_samples > 1 for work in job.works)
        self.llm: Any = LLM(
            model=str(model_folder(job.model, job.dtype, folder)),
            skip_tokenizer_init=True,
            load_format="auto" if Path(job.model).is_dir() else "dummy",
            dtype=job.dtype,
            gpu_memory_utilization=job.gpu_memory_utilization,
            max_model_len=max(2048, job.longest),
            max_num_seqs=job.max_batch_size,
            enable_prefix_caching=self.shares_prompts,
            disable_log_stats=True,
            **{"seed": job.seed, **job.vllm},
        )

    def sample(self, prompts: Sequence[Sequence[int]], work: Workload) -> Callable[[], Sampled]:
        from vllm import SamplingParams

        if work.num_samples > 1:
            self.llm.reset_prefix_cache()  # the prompts of an earlier call must be computed again
        sampling = [
            SamplingParams(
                n=work.num_samples, temperature=1.0, max_tokens=limit, ignore_eos=True, detokenize=False, logprobs=0
            )
            for limit in work.limits
        ]
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
        return lambda: _of_outputs([sample for output in outputs for sample in output.outputs])


def _of_outputs(samples: Sequence[Any]) -> Sampled:
    drawn = [
        at[token].logprob for sample in samples for at, token in zip(sample.logprobs, sample.token_ids, strict=True)
    ]
    return Sampled(
        [len(sample.token_ids) for sample in samples],
        [len(sample.logprobs) for sample in samples],
        sum(drawn) / max(len(drawn), 1),
    )


def measure(job: DecodeJob) -> dict[str, Any]:
    import torch
    import vllm

    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        result, _engine = timed(job, lambda: VllmSampling(job, Path(folder)))
        # It takes the share of the memory that it is given, needed or not, in a process of its own.
        free, total = torch.cuda.mem_get_info()
        for found in result["workloads"].values():
            found["peak_gib"] = (total - free) / GIB
    result["version"] = vllm.__version__
    return result
