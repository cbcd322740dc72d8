"""The GPU kernels of the native engine, in Triton, imported where Triton is installed. Each has a counterpart in plain
torch.

| file | content |
|---|---|
| `paged.py` | attention of one new token per sequence over its pages |
| `shared_prefix.py` | the same where samples of a group share their prompt's pages: those are read once per group |
| `attend.py` | the kernels of both, in Triton |
| `rope_write.py` | head norm, rotation, and keys and values into their slots, in one launch |
| `recurrent.py` | a token of each sequence in recurrent layers, whose states advance in their slots |
| `drafting.py` | the rows of a step with drafts, and their acceptance |
| `stepping.py` | slots of new tokens, and the state for the next step |
| `sampling.py` | the draw of `sampler.py` with one pass over the logits |
| `shapes.py` | tile sizes and the number of splits: they may be tuned, and change results by rounding only |

No function here synchronises with the device, so all of them can be captured in CUDA graphs. Lengths, tables, slots and
groups may change between replays, shapes may not.
"""

from posttrain.engines.native.kernels.drafting import accept, plan_rows
from posttrain.engines.native.kernels.latent import latent_attention, latent_fits
from posttrain.engines.native.kernels.paged import paged_attention, runs_here, supports
from posttrain.engines.native.kernels.recurrent import (
    convolution_fits,
    convolution_step,
    recurrence_fits,
    recurrence_step,
)
from posttrain.engines.native.kernels.rope_write import write_kv_rope
from posttrain.engines.native.kernels.sampling import sample_rows
from posttrain.engines.native.kernels.shapes import TILES, AttentionTile, attention_tile, num_splits
from posttrain.engines.native.kernels.shared_prefix import (
    DecodeShape,
    PrefixTiles,
    samples_per_tile,
    shared_prefix_attention,
    shared_prefix_pays,
)
from posttrain.engines.native.kernels.stepping import move_on, places

__all__ = [
    "TILES",
    "AttentionTile",
    "DecodeShape",
    "PrefixTiles",
    "accept",
    "attention_tile",
    "convolution_fits",
    "convolution_step",
    "latent_attention",
    "latent_fits",
    "move_on",
    "num_splits",
    "paged_attention",
    "places",
    "plan_rows",
    "recurrence_fits",
    "recurrence_step",
    "runs_here",
    "sample_rows",
    "samples_per_tile",
    "shared_prefix_attention",
    "shared_prefix_pays",
    "supports",
    "write_kv_rope",
]
