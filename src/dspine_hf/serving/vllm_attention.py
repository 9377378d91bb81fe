"""Attention of the candidate pairs in vLLM: more queries over the keys and values that the block has just written.

The pairs of a slot share the block's context, so they run through the same kernel with the same block table: only the
number of queries per request differs. Nothing is read back from the device.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

SUPPORTED = ("CPUAttentionMetadata", "FlashAttentionMetadata", "TritonAttentionMetadata")


class PairQueries:
    """Attention metadata for `rows` queries per request, made once per pass and kind of metadata."""

    def __init__(self, blocks: int, rows: int):
        self.blocks, self.rows = blocks, rows
        self._made: dict[int, Any] = {}

    def attend(self, attn: Attention, q: torch.Tensor) -> torch.Tensor:
        """Attend to everything that the requests' blocks see: q [blocks * rows, heads * head_dim] -> same shape.

        Raises:
            NotImplementedError: the attention backend is one that this file does not know.
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a profiling run has no cache
            return torch.zeros_like(q)
        if not isinstance(metadata, dict):
            raise NotImplementedError("DSpine drafts in one batch at a time: leave dual-batch overlap off.")
        own = metadata[attn.layer_name]
        if id(own) not in self._made:
            self._made[id(own)] = self._metadata(attn, own)
        q = q.view(-1, attn.num_heads, attn.head_size)
        output = torch.empty_like(q)
        attn.impl.forward(attn, q, q, q, attn.kv_cache, self._made[id(own)], output)
        return output.flatten(1)

    def _metadata(self, attn: Attention, own: Any) -> Any:
        kind = type(own).__name__
        if kind not in SUPPORTED:
            raise NotImplementedError(
                f"expected an attention backend with {' or '.join(SUPPORTED)} for the drafter; found {kind}. Name one "
                'in the speculative config: "attention_backend": "FLASH_ATTN".'
            )
        requests = own.query_start_loc.shape[0] - 1
        starts = torch.arange(requests + 1, dtype=torch.int32, device=own.query_start_loc.device) * self.rows
        changes: dict[str, Any] = {
            "num_actual_tokens": self.blocks * self.rows,
            "max_query_len": self.rows,
            "query_start_loc": starts.clamp(max=self.blocks * self.rows),
            "causal": False,
            "scheduler_metadata": None,
        }
        if kind == "CPUAttentionMetadata":
            changes["scheduler_metadata"] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=requests,
                num_heads=attn.num_heads,
                num_kv_heads=attn.num_kv_heads,
                head_dim=attn.head_size,
                seq_lens=own.seq_lens,
                dtype=attn.kv_cache.dtype,
                query_start_loc=changes["query_start_loc"],
                causal=False,
                sliding_window_size=-1,
                isa=attn.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            )
        return replace(own, **changes)
