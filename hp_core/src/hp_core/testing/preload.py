"""What the fork server of the rank pool imports once, so that a rank starts in a fraction of a second.

Importing this module sets OMP_NUM_THREADS: only the fork server imports it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
