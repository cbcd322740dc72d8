"""Seconds of each stage of a step: operations and bytes divided by the rates that the GPU reaches.

Counted: matrix products, attention, elementwise kernels, accumulating gradients, the optimizer, kernel launches.
Not counted: rewards, reading data, validation, checkpoints, communication between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.apps.plan.calibration import CALIBRATION, Gpu
from posttrain.apps.plan.decoding import answer_lengths, batch_sizes, prompt_reads, stretches
from posttrain.apps.plan.phases import CachePlan
from posttrain.apps.plan.workload import Workload
from posttrain.policy.memory.layer_bytes import FP32, Pass
from posttrain.policy.memory.model_shape import ModelShape
from posttrain.policy.memory.peak_memory import RankMemory
from posttrain.policy.memory.settings import OptimizerSettings, draft_length

# Times that each number which lives of a logit (`compared_numbers`) is read or written; counted operation by operation.
_MOVED_BY_COMPARING = 10
_NUM_RUNS_PER_CAPTURE = 2  # engines/native/cuda_graph_cache.py: one to warm up, one to capture


@dataclass(frozen=True)
class StepTime:
    """Seconds. The three stages carry the names that a run reports under `timing/train/`."""

    prompts_s: float  # of generation
    decoding_s: float
    capture_s: float  # of CUDA graphs, where training has released the last ones
    logprobs_s: float
    passes_s: float  # forward and backward
    optimizer_s: float
    mean_step_s: float  # of decoding one token for all rows
    num_decode_steps: int

    @property
    def generation_s(self) -> float:
        return self.prompts_s + self.decoding_s + self.capture_s

    @property
    def training_s(self) -> float:
        return self.passes_s + self.optimizer_s

    @property
    def total_s(self) -> float:
        return self.generation_s + self.logprobs_s + self.training_s

    @property
    def stages(self) -> dict[str, float]:
        return {
            "generation": self.generation_s,
            "policy_and_reference_logprobs": self.logprobs_s,
            "policy_training": self.training_s,
        }


@dataclass(frozen=True)
class TimeModel:
    memory: RankMemory
    gpu: Gpu

    # -- passes --------------------------------------------------------------------------------------------------------

    def forward_s(self, row: Pass, *, head: bool = True, adapters: bool = True, fp8_share: float = 0.0) -> float:
        """On the device: one forward pass; `head`: with logits of response tokens; `fp8_share` of layers in FP8."""
        shape = self.memory.shape
        flops = 2.0 * shape.layer_products * row.tokens * self._time_share(fp8_share)
        moved = shape.layers * row.tokens * self.memory.layer.moved_forward() + shape.layers * self._gather_bytes(row)
        if adapters:
            moved += shape.layers * row.tokens * self.memory.layer.moved_by_adapters()[0]
        if head and not self.memory.settings.scores_answers:
            flops += 2.0 * shape.head_products * row.responses
            moved += 2 * FP32 * shape.vocab * row.responses
        return self._unfused * (self._products_s(flops) + self._attention_s(row) + self._moved_s(moved))

    def backward_s(self, row: Pass) -> float:
        settings, shape = self.memory.settings, self.memory.shape
        sides = 2.0 if settings.lora_rank is None else 1.0  # gradients of inputs, and of weights that are trained
        of_layers = sides - 1 + self._time_share(self._trained_in_fp8)
        flops = 2.0 * of_layers * shape.layer_products * row.tokens
        layer = self.memory.layer
        moved = layer.moved_backward() + layer.moved_by_adapters()[1] + layer.moved_by_quantising()
        moved = shape.layers * (row.tokens * moved + 1.5 * self._gather_bytes(row))
        if not settings.scores_answers:
            again = 1.0 if self.memory.layer.recomputes_logits(row) else 0.0
            flops += 2.0 * (sides + again) * shape.head_products * row.responses
            moved += (FP32 + settings.element + again * FP32) * shape.vocab * row.responses
        seconds = self._products_s(flops) + 2.5 * self._attention_s(row) + self._moved_s(moved)
        if settings.checkpointing:
            seconds += self.forward_s(row, head=False, fp8_share=self._trained_in_fp8) / self._unfused
        return self._unfused * seconds

    def _time_share(self, fp8_share: float) -> float:
        """Time of products of which this share is in FP8, in parts of their time in bf16."""
        return 1 - fp8_share + fp8_share / CALIBRATION.fp8_speedup

    @property
    def _trained_in_fp8(self) -> float:
        return float(self.memory.settings.fp8)

    def _quantising_s(self, *, gradients: bool) -> float:
        """Weights of the layers, before a pass in FP8; those for gradients are read twice."""
        element = self.memory.settings.element
        moved = (element + 1) + (2 * element + 1 if gradients else 0)
        return self._moved_s(moved * self._trained_in_fp8 * self.memory.shape.layer_weights)

    @property
    def _fp8_share(self) -> float:
        engine = self.memory.settings.engine
        return 0.0 if engine is None else engine.fp8_share(self.memory.shape.layers)

    @property
    def _unfused(self) -> float:
        return 1.0 if self.memory.shape.fused else CALIBRATION.unfused_time

    def _products_s(self, flops: float) -> float:
        # Weights in fp32 are multiplied in TF32 at best, which is half as fast.
        slower = 1.0 if self.memory.settings.element == 2 else 2.0
        return slower * flops / (self.gpu.matrix_flops * CALIBRATION.matrix_share)

    def _attention_s(self, row: Pass) -> float:
        flops = 4.0 * self.memory.shape.query_width * row.pairs * self.memory.shape.layers
        return flops / (self.gpu.matrix_flops * CALIBRATION.attention_share)

    def _moved_s(self, num_bytes: float) -> float:
        return num_bytes / (self.gpu.copy_bytes_per_s * CALIBRATION.elementwise_share)

    def _gather_bytes(self, row: Pass) -> float:
        """Keys and values of one layer, read and written."""
        return 2 * 2 * self.memory.settings.element * self.memory.shape.kv_width * row.gathered

    # -- stages --------------------------------------------------------------------------------------------------------

    def step(self, workload: Workload, cache: CachePlan | None) -> StepTime:
        sampler = TimeModel(self.memory.sampler, self.gpu)
        prompts, decoding, recording, num_steps = sampler._generation_s(workload, cache)
        critic = self.memory.critic
        trained = [self, *([TimeModel(critic, self.gpu)] if critic is not None else [])]
        scored = [self] * (workload.num_scorings + 1 - len(trained)) + trained[1:]
        # Images whose features are not at hand from sampling; those of a tower that is trained never are.
        unseen = int(self.memory.settings.num_engines > 0 or not workload.num_sampled)
        scored_images, trained_images = min(workload.num_scorings, unseen), 0 if workload.num_scorings else unseen
        if self.memory.settings.trains_tower:
            scored_images, trained_images = workload.num_scorings, 3
        images = self.images_s(workload.num_groups, workload.lengths.prompt)
        if workload.num_sampled:
            prompts += sampler.images_s(workload.num_sampled_groups, workload.lengths.prompt)
        return StepTime(
            prompts_s=prompts,
            decoding_s=decoding,
            capture_s=recording,
            logprobs_s=sum(model.scoring_s(workload) for model in scored) + scored_images * images,
            passes_s=sum(model.passes_s(workload) for model in trained) + trained_images * images,
            optimizer_s=workload.num_updates * sum(model.optimizer_s() for model in trained),
            mean_step_s=decoding / num_steps if num_steps else 0.0,
            num_decode_steps=num_steps,
        )

    def images_s(self, count: float, tokens: float) -> float:
        """The tower, once for so many images of `tokens` tokens each; its layers are not fused."""
        products, attention = self.memory.shape.tower.flops(tokens)
        seconds = self._products_s(products) + attention / (self.gpu.matrix_flops * CALIBRATION.attention_share)
        return count * CALIBRATION.unfused_time * seconds

    def scoring_s(self, workload: Workload) -> float:
        """One pass over all samples. The device waits while the next row is packed: results are fetched before."""
        row, count = workload.passes(workload.score, self.memory.shape.window)
        host = self.memory.shape.layers * CALIBRATION.forward_host_s
        device = self.forward_s(row, adapters=False, fp8_share=self._trained_in_fp8) + self._fetched_s(1)
        return self._quantising_s(gradients=False) + count * (max(device, host) + row.tokens * CALIBRATION.row_host_s)

    def passes_s(self, workload: Workload) -> float:
        row, count = workload.passes(workload.train, self.memory.shape.window)
        device = self.forward_s(row, fp8_share=self._trained_in_fp8) + self.backward_s(row)
        # Gradients of each micro-batch are accumulated in fp32 by the GEMM; sharded ones are written and read before.
        settings = self.memory.settings
        on_the_way = 0 if settings.ranks == 1 else settings.element
        device += self._moved_s((on_the_way + 2 * FP32) * self.memory.num_trained)
        device += self._fetched_s(2) + self._fetched_s(1, self.memory.num_trained * settings.element)
        again = 1 if self.memory.settings.checkpointing else 0
        launching = (1 + again) * CALIBRATION.forward_host_s + CALIBRATION.backward_host_s
        host = self.memory.shape.layers * launching + row.tokens * CALIBRATION.row_host_s
        if (teacher := self.memory.teacher) is not None:
            device += TimeModel(teacher, self.gpu).forward_s(row) + self._compared_s(row, teacher.shape)
            host += teacher.shape.layers * CALIBRATION.forward_host_s
        return workload.num_updates * self._quantising_s(gradients=True) + count * max(device, host)

    def _compared_s(self, row: Pass, teacher: ModelShape) -> float:
        """The policy's logits beside the teacher's; computed a second time for the backward pass."""
        heads = self.memory.shape.head_products + teacher.head_products
        moved = _MOVED_BY_COMPARING * FP32 * self.memory.settings.compared_numbers * teacher.vocab
        return self._products_s(2.0 * heads * row.responses) + self._moved_s(moved * row.responses)

    def _fetched_s(self, times: int, num_bytes: float | None = None) -> float:
        """Weights (or so many bytes) that pass between host and GPU, where they are in host memory."""
        if not self.memory.settings.in_host_memory:
            return 0.0
        share = (self.memory.weights if num_bytes is None else num_bytes) / self.memory.settings.ranks
        return times * share / self.gpu.host_bytes_per_s

    def optimizer_s(self) -> float:
        """Norm, clipping, the update and rounding back; one update."""
        memory, optimizer = self.memory, self.memory.settings.optimizer
        weights = memory.num_trained / memory.settings.ranks
        moved = weights * (3 * FP32 + 2 * FP32)  # squares for the norm, clipping
        state = memory.state_bytes() / memory.settings.ranks
        moved += self._update_bytes(optimizer, weights, state)
        seconds = self._moved_s(moved)
        if optimizer.is_offloaded:
            # Both directions overlap.
            fetched = state + (weights * (FP32 + memory.settings.element) if memory.settings.in_host_memory else 0.0)
            seconds = max(seconds, fetched / self.gpu.host_bytes_per_s)
        return seconds

    def _update_bytes(self, optimizer: OptimizerSettings, weights: float, state: float) -> float:
        element = self.memory.settings.element
        rounding_back = weights * (FP32 + element) if element != FP32 else 0.0
        if optimizer.kind in ("foreach", "single"):
            return weights * CALIBRATION.foreach_bytes * optimizer.num_moments / 2 + rounding_back
        if optimizer.kind == "fused":
            return weights * (FP32 + 2 * FP32 * (1 + optimizer.num_moments)) + rounding_back
        return weights * (FP32 + 2 * element) + 2 * state

    # -- generation ----------------------------------------------------------------------------------------------------

    def _generation_s(self, workload: Workload, cache: CachePlan | None) -> tuple[float, float, float, int]:
        """Seconds of prompts, decoding and capturing; and the number of decode steps."""
        engine, shape = self.memory.settings.engine, self.memory.shape
        if cache is None or engine is None:
            return 0.0, 0.0, 0.0, 0
        prompt = workload.lengths.prompt
        tokens = workload.num_sampled_groups * prompt
        row = Pass(tokens, 0.0, 0.0, tokens * (prompt + 1) / 2)
        prompts = max(
            self.forward_s(row, head=False, fp8_share=self._fp8_share),
            shape.layers * CALIBRATION.forward_host_s * tokens / engine.max_prefill_tokens,
        )
        element = self.memory.settings.element
        # The weights are quantised first.
        prompts += self._moved_s((element + 1) * self._fp8_share * shape.layer_weights)
        longest = min(workload.max_new_tokens, int(workload.max_total_tokens - prompt))
        count = round(workload.num_sampled_groups * workload.num_sampled)
        mean = longest if workload.fixed_length else workload.lengths.answer
        lengths = answer_lengths(count, min(mean, longest), longest)
        max_rows = min(engine.rows, self.rows_that_fit(workload, cache))
        sizes = batch_sizes(engine.rows)
        decoding, num_steps, used = 0.0, 0, set()
        for stretch in stretches(lengths, max_rows):
            size = next(size for size in sizes if size >= stretch.rows)
            used.add(size)
            own, group_size = stretch.own_tokens, workload.num_sampled
            step = self.decode_step_s(size, stretch.rows, prompt, own, group_size)
            if (
                stretch.none_waits
                and not workload.fixed_length
                and (width := 1 + draft_length(size, engine.num_drafts)) > 1
            ):
                drafted = self.decode_step_s(width * size, width * stretch.rows, prompt, own, group_size)
                drafted /= CALIBRATION.drafted_tokens_per_step
                step = drafted if engine.num_drafts is not None else min(step, drafted)
            decoding += stretch.steps * step
            num_steps += stretch.steps
        recordings = len(used) if self.memory.captures_graphs and not cache.is_kept else 0
        recording = recordings * _NUM_RUNS_PER_CAPTURE * shape.layers * CALIBRATION.forward_host_s
        return prompts, decoding, recording, num_steps

    def rows_that_fit(self, workload: Workload, cache: CachePlan) -> int:
        """Rows of mean length that fit into the cache at the end of their answers."""
        own = workload.lengths.answer + workload.lengths.prompt / max(workload.num_sampled, 1)
        fitting = max(1, int(cache.tokens // max(own, 1)))
        return fitting if cache.max_rows is None else max(1, min(fitting, cache.max_rows))

    def decode_step_s(self, size: int, rows: int, prompt: float, own_tokens: float, group_size: int) -> float:
        """One token for `rows` rows, computed as a batch of `size`."""
        shape, settings = self.memory.shape, self.memory.settings
        element = settings.element
        reads = prompt_reads(group_size, max(1, shape.heads // shape.kv_heads), element) / group_size
        context = own_tokens + prompt * (1.0 if shape.keeps_latents else reads)
        if shape.window is not None:
            context = min(context, shape.window)
        cached = rows * context * self.memory.cache_bytes_per_token()
        adapters = self.memory.layer.moved_by_adapters()[0]
        moved = size * shape.layers * (self.memory.layer.moved_forward() + adapters)
        moved += 2 * rows * shape.state_bytes(element)  # read and written
        read = shape.weights_read(size)
        layers = self._few_rows_s(shape.layer_products, size, self._fp8_share, read) + self._moved_s(moved)
        in_fp8 = settings.engine is not None and settings.engine.cache_in_fp8
        attention = CALIBRATION.fp8_decode_attention_share if in_fp8 else CALIBRATION.decode_attention_share
        layers += cached / (self.gpu.copy_bytes_per_s * attention)
        launches = 1.0 if settings.lora_rank is None else 2.0  # kernels of a layer, as a multiple of the plain one's
        layers += shape.layers * (launches * CALIBRATION.decode_layer_s + size * CALIBRATION.decode_row_s)
        head = self._few_rows_s(shape.head_products, size) + self._moved_s(2 * FP32 * shape.vocab * size)
        device = self._unfused * (layers + head)
        if self.memory.captures_graphs:
            return device
        return max(device, shape.layers * CALIBRATION.forward_host_s)

    def _few_rows_s(self, num_weights: float, rows: int, fp8_share: float = 0.0, read: float | None = None) -> float:
        """Products of a few rows: computing and reading the weights overlap, the slower of the two dominates. `read`:
        where the rows go to different weights."""
        computing = self._products_s(2.0 * num_weights * rows) * self._time_share(fp8_share)
        read = num_weights if read is None else read
        reading = (1 - fp8_share) * self.memory.settings.element * read / CALIBRATION.weight_read_share
        reading += fp8_share * read / CALIBRATION.fp8_weight_read_share
        reading /= self.gpu.copy_bytes_per_s
        return float((computing**3 + reading**3) ** (1 / 3))
