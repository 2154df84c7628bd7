"""Qwen3.6-35B-A3B's geometry on Megatron-Core and Transformer Engine, with LoRA slots.

Importing this package needs neither of them; building a model does, and says which extra installs them.
"""

from trainer_rank.models.megatron.geometry import QWEN_36_35B_A3B, HybridGeometry
from trainer_rank.models.megatron.grid import padded_tokens

__all__ = ["QWEN_36_35B_A3B", "HybridGeometry", "padded_tokens"]
