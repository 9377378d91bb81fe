"""Plug-ins that let serving engines draft with DSpine: the engines stay as they are, and nothing here imports one.

`export` makes a folder that the engines can read; `vllm` and `sglang` are the entry points that the engines call.
"""
