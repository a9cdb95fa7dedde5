"""Causal attention over torch's scaled_dot_product_attention.

Megatron's own local attention builds the [batch, heads, seq, seq] score matrix; SDPA does not.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SdpaAttention(MegatronModule):
    """Core attention of a Megatron layer: scores, softmax and weighted sum; no parameters.

    Sequences are padded on the right, so the causal mask alone keeps real tokens from seeing padding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002 (part of Megatron's signature)
        attn_mask_type: AttnMaskType,
        attention_type: str,  # noqa: ARG002
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_dropout or config.attention_dropout:
            raise ValueError("SdpaAttention is causal and has no dropout")
        self._softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002 (causality is the mask)
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Query [seq, batch, heads, head_dim], key and value [seq, batch, kv_heads, head_dim] -> [seq, batch, hidden]."""
        if packed_seq_params is not None:
            raise ValueError("SdpaAttention has no packed sequences")
        query_BHSD, key_BHSD, value_BHSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context_BHSD = F.scaled_dot_product_attention(
            query_BHSD, key_BHSD, value_BHSD, is_causal=True, scale=self._softmax_scale, enable_gqa=True
        )
        return context_BHSD.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
