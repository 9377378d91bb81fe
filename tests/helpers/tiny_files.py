"""A tiny chat target on disk, with its tokenizer, and token sequences to train on."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 58
SPECIAL = ["<pad>", "<user>", "<assistant>", "<end>", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% if enable_thinking is defined and enable_thinking %}"
    "{{ 'w0 ' }}{% endif %}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0..w57 and a chat template that writes one word per role."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
    )


def tiny_chat_target(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama of 4 layers, d = 16, whose vocabulary is the tokenizer's; its texts differ by their prompts."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + WORDS,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5)
    return model


def save_tiny_target(folder: Path) -> Path:
    """Write target and tokenizer to `folder`."""
    tiny_chat_target().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_sequences(count: int, seed: int = 3, vocabulary: int = 63, shortest: int = 12, longest: int = 32) -> list:
    """Rows of random tokens with prompts of 2 to 7 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, size=1):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [
        {"tokens": draw(0, vocabulary, draw(shortest, longest)[0]), "prompt_length": draw(2, 8)[0]}
        for _ in range(count)
    ]


def write_jsonl(path: Path, rows: list) -> Path:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
