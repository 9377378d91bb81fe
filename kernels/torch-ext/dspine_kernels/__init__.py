"""DSpine's fused operations in Triton: of the names and arguments of the eager ones in `ops_dspine.py`.

The package imports without triton and without a GPU; `available(device)` and `why_not(device)` say what can run.
"""

from ._runtime import MISSING, available, why_not

__all__ = ["available", "why_not"]

if not MISSING:
    from .attention import verify_attention
    from .columns import addresses, move_columns
    from .injection import gated_injection
    from .linear import gated_linear, linears
    from .norms import rms_norm, rotated_heads, swiglu
    from .pairs import pair_scores, pair_write
    from .topk import topk
    from .tree import follow_tree, grow_tree
    from .walk import walk_chain

    __all__ += ["gated_injection", "gated_linear", "linears", "pair_scores", "pair_write", "topk"]
    __all__ += ["addresses", "follow_tree", "grow_tree", "move_columns", "verify_attention", "walk_chain"]
    __all__ += ["rms_norm", "rotated_heads", "swiglu"]
