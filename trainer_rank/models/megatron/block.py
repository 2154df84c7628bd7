"""The frozen base: Megatron-Core's transformer block on Transformer Engine, built from one geometry."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from trainer_rank.errors import UnsupportedError

if TYPE_CHECKING:
    from trainer_rank.geometry import Topology
    from trainer_rank.models.megatron.geometry import HybridGeometry


def require_megatron() -> None:
    """Make sure that the GPU stack is installed.

    Raises:
        UnsupportedError: which package is missing, and the extra that installs it.
    """
    for package in ("megatron.core", "transformer_engine.pytorch", "fla"):
        try:
            __import__(package)
        except ImportError as error:
            raise UnsupportedError(
                f"the Megatron model needs {package}, which cannot be imported ({error}); install the extra "
                "trainer-rank-qualification[megatron] (Python 3.12 or newer, a CUDA device; see docs/gpu.md)"
            ) from error


def initialise_parallel(topology: Topology, seed: int) -> None:
    """Create torch.distributed's and Megatron's process groups unless they exist, and seed Megatron's generators.

    One process needs no launcher.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        if "RANK" in os.environ:
            torch.distributed.init_process_group("nccl")
        else:
            store = Path(tempfile.mkdtemp(prefix="trainer-rank-")) / "store"
            torch.distributed.init_process_group("nccl", init_method=store.as_uri(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            context_parallel_size=topology.context, create_gloo_process_groups=False
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def transformer_config(geometry: HybridGeometry, topology: Topology) -> Any:
    """Megatron's configuration of ``geometry``: BF16, no biases, full recompute of one layer at a time."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=geometry.layers,
        hidden_size=geometry.hidden,
        ffn_hidden_size=geometry.expert_hidden,
        num_attention_heads=geometry.query_heads,
        num_query_groups=geometry.key_value_heads,
        kv_channels=geometry.head_dimension,
        attention_output_gate=True,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_rope_fusion=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=geometry.attention_every,
        linear_conv_kernel_dim=geometry.convolution_kernel,
        linear_key_head_dim=geometry.delta_head_dimension,
        linear_value_head_dim=geometry.delta_head_dimension,
        linear_num_key_heads=geometry.delta_key_heads,
        linear_num_value_heads=geometry.delta_value_heads,
        num_moe_experts=geometry.experts,
        moe_router_topk=geometry.experts_per_token,
        moe_ffn_hidden_size=geometry.expert_hidden,
        moe_shared_expert_intermediate_size=geometry.shared_expert_hidden,
        moe_shared_expert_gate=True,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - packed tokens, not a credential
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        context_parallel_size=topology.context,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        transformer_impl="transformer_engine",
    )


class Base(torch.nn.Module):
    """Embedding, transformer block, final norm and untied head, every parameter frozen."""

    def __init__(self, geometry: HybridGeometry, topology: Topology, seed: int) -> None:
        super().__init__()
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_block_with_experimental_attention_variant_spec as block_specification,
        )
        from megatron.core.transformer.transformer_block import TransformerBlock

        device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(seed)
        config = transformer_config(geometry, topology)
        self.block = TransformerBlock(config, block_specification(config)).to(device)
        factory: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.embedding = torch.nn.Parameter(
            torch.empty(geometry.vocabulary, geometry.hidden, **factory).normal_(std=0.02)
        )
        self.head = torch.nn.Parameter(torch.empty(geometry.vocabulary, geometry.hidden, **factory).normal_(std=0.02))
        self.rotary = RotaryEmbedding(
            kv_channels=geometry.head_dimension,
            rotary_percent=geometry.rotary_fraction_percent / 100,
            rotary_base=geometry.rotary_base,
        )
        self.requires_grad_(False)
        release_routing_after_forward(self.block)


def release_routing_after_forward(block: torch.nn.Module) -> None:
    """Drop what each token dispatcher keeps of its last batch once its layer's forward has used it.

    Megatron's dispatcher holds the routing probabilities (float32, experts), the routing map (bool, experts) and the
    permutation's row map (int32, 2 x experts + 1) of every token until the layer runs again: at 256 experts
    1,024 + 256 + 2,052 = 3,332 B per token and layer, beside the 4,096 B of the recompute boundary. The graph holds its
    own references where it needs them.
    """
    kept = ("probs", "routing_map", "reversed_local_input_permutation_mapping")

    def release(module: torch.nn.Module, _inputs: object, _output: object) -> None:
        for name in kept:
            if isinstance(getattr(module.token_dispatcher, name, None), torch.Tensor):
                setattr(module.token_dispatcher, name, None)

    for module in block.modules():
        if hasattr(module, "token_dispatcher"):
            module.register_forward_hook(release)
