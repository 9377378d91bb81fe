"""Ask a server of examples/serve_vllm.sh or examples/serve_sglang.sh something, token by token (OpenAI's protocol).

python examples/client.py --url http://127.0.0.1:8000/v1 --prompt "Why is the sky blue?"
"""

import argparse
import json
import urllib.request
from collections.abc import Iterator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="SGLang's default port is 30000.")
parser.add_argument("--prompt", default="Why is the sky blue?")
parser.add_argument("--max-tokens", type=int, default=128)
parser.add_argument("--temperature", type=float, default=0.0)


def post(url: str, body: dict) -> Iterator[dict]:
    """The events of a streamed completion."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            event = line.decode().strip().removeprefix("data: ")
            if event and event != "[DONE]":
                yield json.loads(event)


def served_model(url: str) -> str:
    """The name of the model that the server offers."""
    with urllib.request.urlopen(f"{url}/models") as reply:
        return json.load(reply)["data"][0]["id"]


def main() -> None:
    args = parser.parse_args()
    body = {
        "model": served_model(args.url),
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stream": True,
    }
    for event in post(f"{args.url}/chat/completions", body):
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
