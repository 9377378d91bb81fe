"""Bulk responses of a small Llama-family target: one CUDA graph per decode step, thousands of rows in lockstep."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .ops_dspine import find_kernels

CHECK_EVERY = 32  # steps between two looks at whether every row has ended


class StepDecoder:
    """One decode step of a Llama model over a static cache; sequences advance in lockstep, prompts are forced.

    Args:
        model: a LlamaForCausalLM without biases. batch: rows. length: tokens per row, prompt included.
        attention: "sdpa" reads the whole cache in every step, "fused" its written columns alone (Triton); "auto" is
            "fused" on CUDA where the kernels can run.

    Raises:
        ValueError: "fused" was asked for and the kernels cannot run.
    """

    def __init__(self, model: Any, batch: int, length: int, attention: str = "auto"):
        config, self.length = model.config, length
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.hd, self.eps = config.hidden_size // self.heads, config.rms_norm_eps
        self.embed, self.head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.final_norm = model.model.norm.weight
        device, dtype = model.device, model.dtype
        self.fused = fused_attention(attention, device.type, dtype)
        self.layers = [
            (
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, n).weight for n in ("q_proj", "k_proj", "v_proj")]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in model.model.layers
        ]
        shape = (len(self.layers), batch, self.kv, length, self.hd)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        places = torch.arange(length, device=device)[None]
        self.cos, self.sin = (t[0] for t in model.model.rotary_emb(self.embed[:1, None].expand(1, length, -1), places))
        self.tokens = torch.zeros(batch, length + 1, dtype=torch.long, device=device)
        self.forced = torch.zeros(batch, dtype=torch.long, device=device)
        self.temperature = torch.zeros(batch, 1, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.first = torch.zeros(batch, dtype=torch.long, device=device)
        self.graph = None

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

    def _attend(self, q: torch.Tensor, layer: int, mask: torch.Tensor | None) -> torch.Tensor:
        """The columns up to `place`: q [batch, heads, hd] -> [batch, heads * hd]."""
        keys, values, rows = self.keys[layer], self.values[layer], len(q)
        if self.fused is not None:
            out = self.fused(q.unsqueeze(2), keys, values, self.first, self.place.expand(rows, 1))
        else:
            q = q.reshape(rows, self.kv, self.heads // self.kv, self.hd)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return out.reshape(rows, -1)

    def _mask(self, rows: int) -> torch.Tensor | None:
        if self.fused is not None:
            return None
        mask = (torch.arange(self.length, device=self.place.device) <= self.place).view(1, 1, 1, -1)
        return mask.expand(rows, 1, self.heads // self.kv, -1)

    def step(self) -> None:
        """Run column `place` of `tokens` and write column `place + 1` where it is not forced."""
        ids = self.tokens.index_select(1, self.place).squeeze(1)
        cos, sin = self.cos.index_select(0, self.place), self.sin.index_select(0, self.place)
        h, mask = self.embed[ids], self._mask(len(ids))
        d = h.shape[-1]
        for i, (norm, qkv, out, mlp_norm, gate_up, down) in enumerate(self.layers):
            x = F.linear(F.rms_norm(h, (d,), norm, self.eps), qkv).view(len(ids), -1, self.hd)
            x, v = x.split([self.heads + self.kv, self.kv], dim=1)
            q, k = self._rotate(x, cos, sin).split([self.heads, self.kv], dim=1)
            self.keys[i].index_copy_(2, self.place, k.unsqueeze(2))
            self.values[i].index_copy_(2, self.place, v.unsqueeze(2))
            h = h + F.linear(self._attend(q, i, mask), out)
            gate, up = F.linear(F.rms_norm(h, (d,), mlp_norm, self.eps), gate_up).chunk(2, dim=-1)
            h = h + F.linear(F.silu(gate) * up, down)
        logits = F.linear(F.rms_norm(h, (d,), self.final_norm, self.eps), self.head).float()
        gumbel = torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()  # up to its sign
        chosen = logits.addcmul_(self.temperature, gumbel, value=-1).argmax(dim=-1)
        after = self.place + 1
        given = self.tokens.index_select(1, after).squeeze(1)
        chosen = torch.where(after < self.forced, given, chosen)
        self.tokens.index_copy_(1, after, chosen.unsqueeze(1))
        self.place.add_(1)

    @torch.no_grad()
    def run(self, prompts: list[list[int]], temperature: list[float], new_tokens: int, stop: int) -> list[list[int]]:
        """Prompt + up to `new_tokens` tokens of each, ended after the token `stop`."""
        device, rows, longest = self.tokens.device, len(prompts), max(map(len, prompts))
        forced = torch.tensor([len(prompt) for prompt in prompts])
        padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
        for whole in (self.tokens, self.forced, self.temperature, self.place):
            whole.zero_()
        self.tokens[:rows, :longest] = padded.to(device)
        self.forced[:rows] = forced.to(device)
        self.temperature[:rows, 0] = torch.tensor(temperature).to(device)
        if self.graph is None and self.tokens.is_cuda:
            self._capture()
        for step in range(1, min(self.length, longest + new_tokens)):
            self.graph.replay() if self.graph is not None else self.step()
            if step % CHECK_EVERY == 0 and self._ended(rows, step, new_tokens, stop):
                break
        found = self.tokens[:rows].tolist()
        return [
            _cut(row, len(prompt), new_tokens, stop, self.length) for row, prompt in zip(found, prompts, strict=True)
        ]

    def _ended(self, rows: int, place: int, new_tokens: int, stop: int) -> bool:
        """Whether each of the first `rows` rows, written up to column `place`, has its `stop` or all its tokens."""
        forced = self.forced[:rows]
        columns = torch.arange(place + 1, device=forced.device)
        stopped = (self.tokens[:rows, : place + 1] == stop) & (columns >= forced.unsqueeze(1))
        return bool((stopped.any(1) | (forced + new_tokens <= place + 1)).all())

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        self.place.zero_()


def fused_attention(attention: str, device: str, dtype: torch.dtype) -> Callable | None:
    """The kernels' `verify_attention`, or None where [`StepDecoder`] is to use SDPA; arguments as there.

    Args:
        device: its type.
    """
    if attention not in ("auto", "sdpa", "fused"):
        raise ValueError(f"expected attention 'auto', 'sdpa' or 'fused'; found {attention!r}.")
    if attention == "sdpa" or (attention == "auto" and device != "cuda"):
        return None
    kernels, reason = find_kernels()
    reason = kernels.why_not(device, dtype=dtype) if kernels is not None else reason
    if kernels is not None and not reason:
        return kernels.verify_attention
    if attention == "fused":
        raise ValueError(f"expected fused attention to run here; found that {reason}. Use attention='sdpa'.")
    return None


def _cut(row: list[int], prompt: int, new_tokens: int, stop: int, length: int) -> list[int]:
    row = row[: min(length, prompt + new_tokens)]
    return row[: row.index(stop, prompt) + 1] if stop in row[prompt:] else row


class ChatWriter:
    """Chat prompts as token ids, and what the target adds to them.

    Args:
        tokenizer: of the target; its chat template puts a user turn between fixed tokens.
        make_decoder: tokens per row -> a decoder; called once per length.
    """

    def __init__(self, tokenizer: Any, make_decoder: Callable[[int], StepDecoder]):
        self.tokenizer, self.stop = tokenizer, tokenizer.eos_token_id
        self._make = make_decoder
        self._decoders: dict[int, StepDecoder] = {}
        marker = "\x00"
        self.before, self.after = (self._ids(part) for part in self._template(marker).split(marker))
        again = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]
        again += [{"role": "user", "content": marker}]
        text = tokenizer.apply_chat_template(again, tokenize=False, add_generation_prompt=True)
        between = text.split(marker)[1]
        self.between = self._ids(between[between.index(tokenizer.eos_token) + len(tokenizer.eos_token) :])

    def _template(self, content: str) -> str:
        chat = [{"role": "user", "content": content}]
        return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt(self, user: str) -> list[int]:
        """One user turn as a prompt."""
        return self._ids(self._template(user))

    def run(self, prompts: list, temperature: list[float], new_tokens: int, length: int) -> list[list[int]]:
        """Prompts of at most `length` - 1 tokens with their continuations; one batch at most."""
        if not prompts:
            return []
        if length not in self._decoders:
            self._decoders.clear()  # each holds the keys and values of a whole batch
            self._decoders[length] = self._make(length)
        return self._decoders[length].run(prompts, temperature, new_tokens, self.stop)

    def own_prompts(self, count: int, batch: int, length: int) -> list[list[int]]:
        """User turns that the target writes itself at T = 1, as prompts without duplicates."""
        seen: dict[tuple, list[int]] = {}
        for start in range(0, count, batch):
            rows = min(batch, count - start)
            for row in self.run([self.before] * rows, [1.0] * rows, 160, length):
                if row[-1] == self.stop and len(row) - len(self.before) > 6:
                    seen[tuple(row)] = row[:-1] + self.after
        return list(seen.values())

    def second_turns(self, texts: list[list[int]], length: int) -> list[list[int]]:
        """Finished texts with a second user turn that the target writes at T = 1, as prompts."""
        heads = [text + self.between for text in texts]
        rows = self.run(heads, [1.0] * len(heads), 60, length)
        return [
            row[:-1] + self.after
            for row, head in zip(rows, heads, strict=True)
            if row[-1] == self.stop and len(row) - len(head) > 4
        ]


def in_batches(prompts: list, batch: int, seed: int = 0) -> Iterator[tuple[list, list[float]]]:
    """Shuffled batches, each by length, half of each greedy and half at T = 1."""
    order = np.random.default_rng(seed).permutation(len(prompts))
    for number, start in enumerate(range(0, len(order), batch)):
        part = sorted((prompts[i] for i in order[start : start + batch]), key=len)
        yield part, [float((i + number) % 2) for i in range(len(part))]
