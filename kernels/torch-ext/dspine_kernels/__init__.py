"""Fused kernels for DSpine. Every op here has its defining eager version in `ops_dspine.py`."""
