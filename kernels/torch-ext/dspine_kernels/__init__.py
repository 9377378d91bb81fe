"""The place of DSpine's fused kernels; none is written yet. `ops_dspine.py` holds the eager operations."""
