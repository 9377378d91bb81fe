"""Responses from an OpenAI-compatible endpoint, for targets that are served elsewhere."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from .benchmarks import encode_chat
from .data import Job, Reply, answer_jobs
from .journal import Journal


class ServerWriter:
    """Replies through `POST {url}/chat/completions`.

    Args:
        url: the endpoint's base, e.g. `http://127.0.0.1:8000/v1`. `OPENAI_API_KEY`, if set, is sent as bearer token.
        model: the served model's name.
        tokenizer: the target's; it turns the texts into the tokens that a drafter is trained on.
        thinking: sent as `chat_template_kwargs.enable_thinking`, and used for the prompt's tokens.
        retries: how often a busy or unreachable server is asked again, after 1, 2, 4, ... times `pause` seconds.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        max_new_tokens: int,
        thinking: bool | None = None,
        top_p: float = 1.0,
        retries: int = 6,
        pause: float = 1.0,
    ):
        self.url, self.model, self.tokenizer = url.rstrip("/"), model, tokenizer
        self.max_new_tokens, self.thinking, self.top_p = max_new_tokens, thinking, top_p
        self.retries, self.pause = retries, pause

    def reply(self, chats: list[list[dict]], temperature: float, seeds: list[int]) -> list[Reply]:
        """One reply to each conversation, one after the other."""
        return [self._one(chat, temperature, seed) for chat, seed in zip(chats, seeds, strict=True)]

    def _one(self, chat: list[dict], temperature: float, seed: int) -> Reply:
        request: dict[str, Any] = {
            "model": self.model,
            "messages": chat,
            "temperature": temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_new_tokens,
            "seed": seed,
        }
        if self.thinking is not None:
            request["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        choice = self.post("chat/completions", request)["choices"][0]
        text = choice["message"].get("content") or ""
        reasoning = choice["message"].get("reasoning_content")
        if reasoning:
            text = f"<think>\n{reasoning}\n</think>\n\n{text}"
        stopped = choice.get("finish_reason") == "stop"
        prompt = encode_chat(self.tokenizer, chat, self.thinking)
        response = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if stopped and self.tokenizer.eos_token_id is not None:
            response.append(self.tokenizer.eos_token_id)
        return Reply(text, [*prompt, *response], len(prompt), stopped)

    def post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """One request, repeated while the server is busy or away.

        Raises:
            ConnectionError: it stayed so. ValueError: the server refused the request.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        for attempt in range(self.retries + 1):
            call = urllib.request.Request(f"{self.url}/{path}", json.dumps(request).encode(), headers)
            try:
                with urllib.request.urlopen(call, timeout=3600) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 429):
                    said = error.read().decode(errors="replace")[:500]
                    raise ValueError(f"{self.url} refused the request with status {error.code}: {said}") from None
                problem: Exception = error
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                problem = error
            if attempt < self.retries:
                time.sleep(self.pause * 2**attempt)
        raise ConnectionError(
            f"no answer from {self.url} after {self.retries + 1} attempts: {problem}. Is it running?"
        )


def answer_from_server(
    writer: ServerWriter,
    jobs: list[Job],
    journal: Journal,
    seed: int,
    concurrency: int = 32,
    done: Callable[[int], None] = lambda n: None,
) -> None:
    """Answer the jobs that the journal does not hold yet, `concurrency` at a time; each is written as it comes."""
    missing = iter([job for job in jobs if job.key not in journal.places])
    done(len(jobs) - sum(job.key not in journal.places for job in jobs))
    with ThreadPoolExecutor(concurrency) as pool:
        running: set[Future] = set()
        try:
            while True:
                while len(running) < 2 * concurrency and (job := next(missing, None)) is not None:
                    running.add(pool.submit(answer_jobs, writer, [job], seed))
                if not running:
                    return
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    journal.append(future.result()[0])
                    done(1)
        finally:
            for future in running:
                future.cancel()
