"""Megatron's packed-sequence parameters with the adapter slot beside them. Needs the extra [megatron]."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from trainer_rank.models.layout import Layout
from trainer_rank.models.megatron.layout import longest_planned


@dataclass
class SlotPackedSequences(PackedSeqParams):  # type: ignore[misc]
    """What every layer of one subforward gets, in forward and again in recompute."""

    slot: str = ""


def slot_packed_sequences(layout: Layout, slot: str, device: torch.device) -> SlotPackedSequences:
    """Parameters of a padded packed batch (THD): cumulative lengths int32 (S + 1,) on ``device``."""
    ends = torch.tensor([0, *accumulate(layout.lengths)], dtype=torch.int32).to(device, non_blocking=True)
    return SlotPackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest_planned(layout),
        max_seqlen_kv=longest_planned(layout),
        slot=slot,
    )
