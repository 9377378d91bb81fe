"""Training sequences: prompt and response as token ids, from regenerated data or from any chat data set."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from .seeds import hash_seed
from .sources import read_rows


class TokenSequences(Dataset):
    """Rows of {"tokens": list[int], "prompt_length": int}; each item also carries its own index.

    Args:
        rows: the rows; a `datasets.Dataset` is read lazily.
        max_length: longer sequences are cut to this many tokens.
    """

    def __init__(self, rows: Any, max_length: int):
        self.rows, self.max_length = rows, max_length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[int(index)]
        return {
            "index": int(index),
            "tokens": row["tokens"][: self.max_length],
            "prompt_length": int(row["prompt_length"]),
        }


class WholeBatches(Sampler):
    """A new order for each epoch, without the rest that would not fill a step's batch.

    So every step has the same sequences, however many processes and accumulated batches share them.

    Args:
        rows: how many rows there are. batch: rows of one optimiser step, over all processes.
        seed: of the orders. step: returns the number of finished steps, which tells the epoch.

    Raises:
        ValueError: the rows do not fill one batch.
    """

    def __init__(self, rows: int, batch: int, seed: int, step: Callable[[], int]):
        if rows < batch:
            raise ValueError(
                f"expected at least {batch} sequences, one step's batch over all processes; found {rows}. Lower "
                "--per-device-train-batch-size or --gradient-accumulation-steps."
            )
        self.rows, self.steps, self.batch, self.seed, self.step = rows, rows // batch, batch, seed, step

    def __len__(self) -> int:
        return self.steps * self.batch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(hash_seed(self.seed, self.step() // self.steps))
        yield from torch.randperm(self.rows, generator=generator)[: len(self)].tolist()


@dataclass
class SequenceCollator:
    """Pads sequences on the right to a multiple of `multiple` tokens, or all to `length`.

    A batch is {"tokens" [batch, length], "lengths", "prompt_lengths", "index" [batch]}.
    """

    pad_id: int = 0
    multiple: int = 32
    length: int | None = None

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = self.length or -(-max(len(item["tokens"]) for item in items) // self.multiple) * self.multiple
        tokens = torch.full((len(items), longest), self.pad_id, dtype=torch.long)
        for row, item in enumerate(items):
            tokens[row, : len(item["tokens"])] = torch.tensor(item["tokens"])
        return {
            "tokens": tokens,
            "lengths": torch.tensor([len(item["tokens"]) for item in items]),
            "prompt_lengths": torch.tensor([item["prompt_length"] for item in items]),
            "index": torch.tensor([item["index"] for item in items]),
        }


def load_sequences(
    source: str,
    tokenizer: Any = None,
    max_length: int = 2048,
    thinking: bool | None = None,
    reachable: bool | None = None,
) -> list[dict[str, Any]] | Any:
    """Read training rows from a `datasets` folder or name, a JSONL or a Parquet file.

    Args:
        source: where the rows are. They hold either "tokens" and "prompt_length", or chat "messages".
        tokenizer: needed for chat messages; its chat template must be the one that the target is used with.
        max_length: rows whose response does not begin at least two tokens before it are left out.
        thinking: passed to the chat template as `enable_thinking`, where given.
        reachable: as in [`sources.read_rows`].

    Raises:
        ValueError: neither form is there, or nothing is left.
    """
    rows = read_rows(source, reachable=reachable)
    columns = _columns(rows)
    if {"tokens", "prompt_length"} <= columns:
        kept = [i for i, row in enumerate(rows) if _usable(row, max_length)]
        result = rows.select(kept) if hasattr(rows, "select") else [rows[i] for i in kept]
    elif columns & {"messages", "conversations"}:
        if tokenizer is None:
            raise ValueError(f"'{source}' holds chat messages, which need the target's tokenizer; found none.")
        found = (row for chat in rows for row in chat_sequences(_messages(chat), tokenizer, thinking))
        result = [row for row in found if _usable(row, max_length)]
    else:
        raise ValueError(
            f"expected rows with 'tokens' and 'prompt_length', or with 'messages', in '{source}'; found the columns "
            f"{sorted(columns)}. Write training data with 'dspine regenerate'."
        )
    if not len(result):
        raise ValueError(
            f"expected responses of two tokens or more within the first {max_length} tokens of rows in '{source}'; "
            "found none. Raise --max-length, or check that the data holds responses."
        )
    return result


def chat_sequences(messages: list[dict[str, str]], tokenizer: Any, thinking: bool | None = None) -> list[dict]:
    """One row per assistant message: everything before it is the prompt.

    The response's tokens are those that the chat template writes for it, up to and with its end-of-turn token.
    """
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    rows = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("content"):
            continue
        prompt = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, tokenize=False, **options)
        whole = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, **options)
        if not whole.startswith(prompt):
            whole = prompt + message["content"] + (tokenizer.eos_token or "")
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_ids = tokenizer(whole[len(prompt) :].rstrip("\n"), add_special_tokens=False)["input_ids"]
        rows.append({"tokens": prompt_ids + response_ids, "prompt_length": len(prompt_ids)})
    return rows


def split_prompts(rows: Any, held_out: int) -> tuple[Any, list[dict[str, Any]]]:
    """Hold out the rows of the last `held_out` prompts: (training rows, greedy held-out rows).

    Rows belong to one prompt when they share an "id"; without that column every row is a prompt of its own. Where
    temperatures are recorded, only greedy responses are evaluated on: acceptance at T = 0 is exact on those.
    """
    ids = [row.get("id", i) for i, row in enumerate(rows)]
    order = list(dict.fromkeys(ids))
    if not 0 < held_out < len(order):
        raise ValueError(
            f"expected to hold out between 1 and {len(order) - 1} of {len(order)} prompts; got {held_out}."
        )
    out = set(order[-held_out:])
    kept = [i for i, key in enumerate(ids) if key not in out]
    greedy = [rows[i] for i, key in enumerate(ids) if key in out and not rows[i].get("temperature")]
    train = rows.select(kept) if hasattr(rows, "select") else [rows[i] for i in kept]
    return train, greedy


def token_counts(rows: Iterable[dict[str, Any]], vocab_size: int) -> torch.Tensor:
    """How often each token occurs in the responses [vocab_size], fp64."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for row in rows:
        counts += torch.bincount(torch.tensor(row["tokens"][row["prompt_length"] :]), minlength=vocab_size)
    return counts


def _usable(row: dict[str, Any], max_length: int) -> bool:
    return 0 < row["prompt_length"] < min(len(row["tokens"]), max_length) - 1


def _columns(rows: Any) -> set[str]:
    names = getattr(rows, "column_names", None)
    return set(names) if names is not None else {name for row in rows[:100] for name in row}


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """Messages in the OpenAI form; ShareGPT's {"from", "value"} is translated."""
    if row.get("messages") is not None:
        return row["messages"]
    roles = {"human": "user", "gpt": "assistant"}
    return [{"role": roles.get(m["from"], m["from"]), "content": m["value"]} for m in row["conversations"]]
