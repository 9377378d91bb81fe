"""A tiny chat model and a drafter for it, in the place of the pair that commands load."""

import torch

from dspine_hf import DSpineDraftModel
from dspine_hf.commands.common import Pair
from helpers.tiny_files import tiny_chat_target, tiny_tokenizer


def tiny_drafter(target):
    torch.manual_seed(1)
    return DSpineDraftModel.for_target(target, block_size=4).eval()


def load_tiny_pair(target, drafter, dtype, device=None):
    """As `load_pair`, whatever is asked for, in the dtype that the command asks for."""
    model = tiny_chat_target().to(dtype)
    return Pair(model, tiny_tokenizer(), tiny_drafter(model), "tiny", "tiny-drafter")
