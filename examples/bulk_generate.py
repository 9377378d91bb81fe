"""Write many responses of a small Llama-family target with one CUDA graph per decode step.

    python examples/bulk_generate.py --target SmolLM2.gguf --prompts 'prompts/*.jsonl' --self-prompts 20000 \
        --samples 2 --batch 2048 --seconds 150 --out tokens/

Prompts are `{"turns": [...]}` lines; `--self-prompts` lets the target write user turns of its own. Half of the
responses are greedy, half are sampled at T = 1. Output: npz shards with `tokens`, `length`, `prompt_length` and
`temperature`.
"""

import argparse
import glob
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from dspine_hf.loading import load_target


class StepDecoder:
    """One decode step of a Llama model over a static cache; sequences advance in lockstep, prompts are forced.

    Args:
        model: a LlamaForCausalLM without biases. batch: rows. length: tokens per row, prompt included.
    """

    def __init__(self, model, batch: int, length: int):
        config, self.length = model.config, length
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.hd, self.eps = config.hidden_size // self.heads, config.rms_norm_eps
        self.embed, self.head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.final_norm = model.model.norm.weight
        device, dtype = model.device, model.dtype
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
        self.graph = None

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

    def step(self) -> None:
        """Run column `place` of `tokens` and write column `place + 1` where it is not forced."""
        ids = self.tokens.index_select(1, self.place).squeeze(1)
        cos, sin = self.cos.index_select(0, self.place), self.sin.index_select(0, self.place)
        mask = (torch.arange(self.length, device=ids.device) <= self.place).view(1, 1, 1, -1)
        mask = mask.expand(len(ids), 1, self.heads // self.kv, -1)
        h = self.embed[ids]
        d = h.shape[-1]
        for i, (norm, qkv, out, mlp_norm, gate_up, down) in enumerate(self.layers):
            x = F.linear(F.rms_norm(h, (d,), norm, self.eps), qkv).view(len(ids), -1, self.hd)
            q, k, v = x.split([self.heads, self.kv, self.kv], dim=1)
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            self.keys[i].index_copy_(2, self.place, k.unsqueeze(2))
            self.values[i].index_copy_(2, self.place, v.unsqueeze(2))
            q = q.reshape(len(ids), self.kv, self.heads // self.kv, self.hd)
            x = F.scaled_dot_product_attention(q, self.keys[i], self.values[i], attn_mask=mask)
            h = h + F.linear(x.reshape(len(ids), -1), out)
            gate, up = F.linear(F.rms_norm(h, (d,), mlp_norm, self.eps), gate_up).chunk(2, dim=-1)
            h = h + F.linear(F.silu(gate) * up, down)
        logits = F.linear(F.rms_norm(h, (d,), self.final_norm, self.eps), self.head).float()
        noise = -torch.log(torch.empty_like(logits).exponential_().clamp_min_(1e-20))
        chosen = torch.argmax(logits + self.temperature * noise, dim=-1)
        after = self.place + 1
        given = self.tokens.index_select(1, after).squeeze(1)
        chosen = torch.where(after < self.forced, given, chosen)
        self.tokens.index_copy_(1, after, chosen.unsqueeze(1))
        self.place.add_(1)

    @torch.no_grad()
    def run(self, prompts: list[list[int]], temperature: list[float], new_tokens: int, stop: int) -> list[list[int]]:
        """Prompt + up to `new_tokens` tokens of each, ended after the token `stop`."""
        self.tokens.zero_()
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.forced.zero_()
        self.forced[: len(prompts)] = torch.tensor([len(p) for p in prompts], device=self.forced.device)
        self.temperature.zero_()
        self.temperature[: len(prompts), 0] = torch.tensor(temperature, device=self.forced.device)
        self.place.zero_()
        if self.graph is None and self.tokens.is_cuda:
            self._capture()
        for _ in range(min(self.length - 1, max(map(len, prompts)) + new_tokens - 1)):
            self.graph.replay() if self.graph is not None else self.step()
        rows = self.tokens[: len(prompts)].tolist()
        return [
            _cut(row, len(prompt), new_tokens, stop, self.length) for row, prompt in zip(rows, prompts, strict=True)
        ]

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


def _cut(row: list[int], prompt: int, new_tokens: int, stop: int, length: int) -> list[int]:
    row = row[: min(length, prompt + new_tokens)]
    return row[: row.index(stop, prompt) + 1] if stop in row[prompt:] else row


def write_own_prompts(decoder: StepDecoder, tokenizer, count: int, batch: int, stop: int) -> list[list[int]]:
    """User turns that the target writes itself at T = 1, as chat prompts without duplicates."""
    marker = "\x00"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(marker))
    seen: dict[tuple, list[int]] = {}
    while count > 0:
        rows = decoder.run([before] * min(batch, count), [1.0] * min(batch, count), 160, stop)
        count -= len(rows)
        for row in rows:
            if row[-1] == stop and len(row) - len(before) > 6:
                seen[tuple(row)] = row[:-1] + after
    return list(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--prompts", nargs="*", default=[])
    for name, value in (("samples", 1), ("self-prompts", 0), ("batch", 2048), ("new-tokens", 256), ("length", 448)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no batch after this long")
    args = parser.parse_args()
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_target(args.target, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model = model.to(device)
    stop = tokenizer.eos_token_id
    decoder = StepDecoder(model, args.batch, args.length)
    prompts = []
    for path in sorted(p for pattern in args.prompts for p in glob.glob(pattern)):
        for line in open(path):
            chat = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompts += [tokenizer(text, add_special_tokens=False)["input_ids"]] * args.samples
    own = write_own_prompts(decoder, tokenizer, args.self_prompts, args.batch, stop)
    print(f"{len(prompts)} given prompts, {len(own)} own, after {time.perf_counter() - started:.0f} s", flush=True)
    prompts = [p for p in prompts + own if len(p) <= args.length // 2]
    order = np.random.default_rng(0).permutation(len(prompts))
    groups = [
        sorted(order[i : i + args.batch], key=lambda j: len(prompts[j])) for i in range(0, len(order), args.batch)
    ]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rows, sizes, heat = [], [], []
    for number, group in enumerate(groups):
        if time.perf_counter() - started > args.seconds:
            break
        chosen = [prompts[j] for j in group]
        temperature = [float((j + number) % 2) for j in range(len(chosen))]
        rows += decoder.run(chosen, temperature, args.new_tokens, stop)
        sizes += [len(p) for p in chosen]
        heat += temperature
        print(f"{len(rows)} of {len(prompts)} responses, {time.perf_counter() - started:.0f} s", flush=True)
    per_shard = 20000
    for shard, start in enumerate(range(0, len(rows), per_shard)):
        part = rows[start : start + per_shard]
        np.savez_compressed(
            out / f"train-{shard:02d}.npz",
            tokens=np.concatenate([np.array(r, dtype=np.uint16) for r in part]),
            length=np.array([len(r) for r in part], dtype=np.uint16),
            prompt_length=np.array(sizes[start : start + per_shard], dtype=np.uint16),
            temperature=np.array(heat[start : start + per_shard], dtype=np.uint8),
        )


if __name__ == "__main__":
    main()
