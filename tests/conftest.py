"""What several test files share: no network, and the embedded target, loaded once a session."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(scope="session")
def embedded_target():
    """(model, tokenizer) of SmolLM2-135M-Instruct in float32. Shared: leave its weights and its config as they are."""
    from dspine_hf import load_embedded_target

    return load_embedded_target(dtype=torch.float32)


@pytest.fixture(scope="session")
def fresh_drafter(embedded_target):
    """A drafter of the embedded target with random weights: nothing it drafts is accepted."""
    from dspine_hf import DSpineDraftModel

    torch.manual_seed(0)
    return DSpineDraftModel.for_target(embedded_target[0]).eval()
