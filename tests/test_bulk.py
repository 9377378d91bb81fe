"""Bulk decoding writes what generate() writes, and its chat prompts are those of the chat template."""

import pytest
import torch
from transformers import AutoTokenizer

from dspine_hf import bulk
from dspine_hf.bulk import ChatWriter, StepDecoder, fused_attention, in_batches
from dspine_hf.ops_dspine import find_kernels
from helpers.tiny_files import save_tiny_target, tiny_chat_target

KERNELS, REASON = find_kernels()
REASON = KERNELS.why_not("cpu") if KERNELS is not None else REASON
needs_kernels = pytest.mark.skipif(bool(REASON), reason=REASON)


class Scripted:
    """A decoder that continues every prompt with the same tokens."""

    def __init__(self, answer):
        self.answer, self.prompts = answer, []

    def run(self, prompts, temperature, new_tokens, stop):
        self.prompts += prompts
        return [prompt + self.answer[:new_tokens] for prompt in prompts]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_tiny_target(tmp_path_factory.mktemp("target")))


def encode(tokenizer, *turns):
    chat = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_greedy_rows_equal_generate_and_end_with_the_stop_token():
    target = tiny_chat_target()
    torch.manual_seed(1)
    prompts = [torch.randint(4, 40, (n,)).tolist() for n in (3, 9, 5, 12)]
    found = StepDecoder(target, 6, 40).run(prompts, [0.0] * 4, 16, 3)
    for prompt, row in zip(prompts, found, strict=True):
        plain = target.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0].tolist()
        assert row == plain


@needs_kernels
def test_fused_attention_writes_the_texts_of_sdpa_from_the_written_columns_alone():
    target = tiny_chat_target()
    torch.manual_seed(1)
    prompts = [torch.randint(4, 40, (n,)).tolist() for n in (2, 4)]
    found = []
    for attention in ("sdpa", "fused"):
        decoder = StepDecoder(target, 2, 10, attention)
        assert (decoder.fused is not None) == (attention == "fused")
        if attention == "fused":
            decoder.keys.fill_(float("nan"))
            decoder.values.fill_(float("nan"))
        torch.manual_seed(2)
        found.append(decoder.run(prompts, [0.0, 1.0], 6, 3))
    assert found[0] == found[1]


def test_attention_is_sdpa_without_cuda_and_refused_where_it_cannot_run(monkeypatch):
    assert fused_attention("auto", "cpu", torch.float32) is None
    monkeypatch.setattr(bulk, "find_kernels", lambda: (None, "triton is missing"))
    assert fused_attention("auto", "cuda", torch.bfloat16) is None
    with pytest.raises(ValueError, match="triton is missing"):
        fused_attention("fused", "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="'flash'"):
        fused_attention("flash", "cpu", torch.float32)


@pytest.mark.parametrize("stop", [19, 23])
def test_steps_end_once_every_row_has_and_the_texts_stay(stop, monkeypatch):
    target = tiny_chat_target()
    torch.manual_seed(1)
    prompts = [[*torch.randint(4, 40, (n,)).tolist(), stop] for n in (3, 14, 5, 9)]  # a stop in a prompt ends nothing
    long = StepDecoder(target, 4, 120).run(prompts, [0.0] * 4, 60, stop)
    assert all(row[-1] == stop and len(row) < len(prompt) + 60 for row, prompt in zip(long, prompts, strict=True))
    for every in (1, 4):
        monkeypatch.setattr(bulk, "CHECK_EVERY", every)
        decoder = StepDecoder(target, 4, 120)
        assert decoder.run(prompts, [0.0] * 4, 60, stop) == long
        written = [len(row) for row in long]
        assert max(written) - 1 <= int(decoder.place) < max(written) - 1 + every


def test_rows_that_have_all_their_tokens_are_waited_for_no_longer(monkeypatch):
    monkeypatch.setattr(bulk, "CHECK_EVERY", 1)
    decoder = StepDecoder(tiny_chat_target(), 2, 60)
    rows = decoder.run([[5, 6, 7], [9, 8, 7, 6, 5]], [0.0, 0.0], 4, -1)
    assert [len(row) for row in rows] == [7, 9] and int(decoder.place) == 8


def test_a_row_is_cut_at_the_decoders_length():
    target = tiny_chat_target()
    rows = StepDecoder(target, 2, 10).run([[5, 6, 7]], [0.0], 16, -1)
    assert [len(row) for row in rows] == [10]


def test_prompts_are_those_of_the_chat_template(tokenizer):
    writer = ChatWriter(tokenizer, lambda length: Scripted([]))
    assert writer.prompt("w1 w2") == encode(tokenizer, "w1 w2")
    words = tokenizer("w7 w8 w9 w1 w2 w3 w4", add_special_tokens=False)["input_ids"]
    own = ChatWriter(tokenizer, lambda length: Scripted([*words, writer.stop])).own_prompts(5, 2, 64)
    assert own == [encode(tokenizer, "w7 w8 w9 w1 w2 w3 w4")]


def test_second_turns_follow_the_first_answer_as_the_template_has_it(tokenizer):
    stop = tokenizer.eos_token_id
    first = encode(tokenizer, "w1 w2") + tokenizer("w3 w4", add_special_tokens=False)["input_ids"] + [stop]
    words = tokenizer("w5 w6 w7 w8 w9", add_special_tokens=False)["input_ids"]
    writer = ChatWriter(tokenizer, lambda length: Scripted([*words, stop]))
    assert writer.second_turns([first], 64) == [encode(tokenizer, "w1 w2", "w3 w4", "w5 w6 w7 w8 w9")]
    endless = ChatWriter(tokenizer, lambda length: Scripted(words))
    assert endless.second_turns([first], 64) == []


def test_batches_hold_every_prompt_once_by_length_and_half_of_each_greedy():
    prompts = [[i] * (1 + i % 5) for i in range(11)]
    batches = list(in_batches(prompts, 4, seed=3))
    assert sorted(map(tuple, (p for part, _ in batches for p in part))) == sorted(map(tuple, prompts))
    for part, temperature in batches:
        assert [len(p) for p in part] == sorted(len(p) for p in part)
        assert abs(sum(temperature) - len(part) / 2) <= 0.5
