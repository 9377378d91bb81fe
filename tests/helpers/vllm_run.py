"""One run of vLLM on CPU in a process of its own: python vllm_run.py SETTINGS.json, which names everything.

Settings: target, drafter (None: no speculation), prompts, tokens, output. The prompts run one by one, so that every
draft can be told apart, and then all together. What was drafted is recorded where vLLM's proposer returns it.
"""

import json
import os
import sys
from pathlib import Path

QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def record(rounds: list) -> None:
    """Append anchors, their positions and their drafts to `rounds` after every proposal."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    propose = DFlashProposer.propose

    def recorded(self, *args, **kwargs):
        drafts = propose(self, *args, **kwargs)
        width = drafts.shape[1] + 1
        positions = self.positions[: drafts.shape[0] * width : width]
        rounds.append([kwargs["next_token_ids"].tolist(), positions.tolist(), drafts.tolist()])
        return drafts

    DFlashProposer.propose = recorded


def main(settings: dict) -> None:
    os.environ.update(QUIET)
    from vllm import LLM, SamplingParams

    rounds: list = []
    record(rounds)
    spec = settings["drafter"] and {"method": "dflash", "model": settings["drafter"], "num_speculative_tokens": 7}
    engine = LLM(
        settings["target"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        speculative_config=spec or None,
    )
    greedy = SamplingParams(temperature=0, max_tokens=settings["tokens"])
    chats = [[{"role": "user", "content": prompt}] for prompt in settings["prompts"]]
    alone = []
    for chat in chats:
        rounds.clear()
        answer = engine.chat([chat], greedy, use_tqdm=False)[0]
        alone.append([list(answer.prompt_token_ids), list(answer.outputs[0].token_ids), list(rounds)])
    together = [list(answer.outputs[0].token_ids) for answer in engine.chat(chats, greedy, use_tqdm=False)]
    Path(settings["output"]).write_text(json.dumps({"alone": alone, "together": together}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
