#!/usr/bin/env bash
# SGLang (on a GPU) with a DSpine drafter: examples/serve_sglang.sh TARGET DRAFTER [options of sglang.launch_server]
#
# DRAFTER is a folder that 'dspine export' has prepared; the block's length is read from it.
set -euo pipefail

target=${1:?name the target}
drafter=${2:?name the exported drafter}
shift 2

exec python -m sglang.launch_server --model-path "$target" \
    --speculative-algorithm DFLASH --speculative-draft-model-path "$drafter" "$@"
