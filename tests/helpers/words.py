"""A tokenizer of single characters, for stop strings, streamers and pipelines."""

import string

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CHARACTERS = string.ascii_letters + "012345"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """61 tokens: 0 is padding, 1 the beginning, 2 the end, the rest one character each."""
    names = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: i for i, c in enumerate(CHARACTERS, start=3)}}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[], unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
