#!/usr/bin/env bash
# The figures of README.md that need GPUs, one JSON each in out/; given again, it makes those that are missing.
#
#   examples/recipes/smollm2-135m/measure.sh SmolLM2-135M-Instruct.gguf drafter/ prompts/ out/ [part ...]
#
# prompts/ holds train/*.jsonl and eval/*.jsonl as for run.sh. Parts, in this order where none is named: kernels, passes,
# decode (tokens per second, trees too), large (a training step at Qwen3-8B's shapes), commands (regenerate, train and
# eval, each killed once and given again; COMMANDS="train eval": these alone), pair (two GPUs: the same loss, resuming, a
# split target; it trains on what run.sh wrote, out/train.npz or SEQUENCES=FILE).
# A figure that takes longer than LIMIT=300 seconds (pair: thrice that) is left out; commands goes on from its last whole
# run when given again. On two CPU cores: TINY=1.
set -uo pipefail
(($# >= 4)) || {
    echo "expected a target, a drafter, a folder of prompts and one for the figures; found $# arguments. See the head of $0." >&2
    exit 1
}
target=$1 drafter=$2 prompts=$3 out=$4 here=$(cd "$(dirname "$0")" && pwd)
parts=("${@:5}")
((${#parts[@]})) || parts=(kernels passes decode large commands pair)
examples=$here/../.. python=${PYTHON:-python3} folder=$out/target
mkdir -p "$out"
failed=()
figure() { # figure NAME command...: runs it unless out/NAME.json is there
    local name=$1
    shift
    [[ -f $out/$name.json ]] && return
    echo "$name ..."
    timeout -k 5 "${LIMIT:-300}" "$@" --out "$out/$name.part" >"$out/$name.log" 2>&1 && mv "$out/$name.part" "$out/$name.json" ||
        failed+=("$name")
}
[[ -f $folder/config.json ]] || "$python" - "$target" "$folder" <<'P' || exit 1
import sys
import torch
from dspine_hf.loading import load_target
model, tokenizer = load_target(sys.argv[1], torch.bfloat16)
vars(model.config).pop("quantization_config", None)
for part in (tokenizer, model):
    part.save_pretrained(sys.argv[2])
P
for part in "${parts[@]}"; do
    bench=("$python" "$examples/bench_decode.py")
    case $part in
    kernels)
        [[ -n ${TINY:-} ]] && export TRITON_INTERPRET=1
        figure kernels "$python" "$examples/bench_kernels.py" ${TINY:+--tiny --only trees --skip-checks --no-compile}
        figure products "$python" "$examples/bench_products.py" ${TINY:+--tiny}
        [[ -n ${TINY:-} ]] && unset TRITON_INTERPRET
        ;;
    passes)
        size=(--shapes qwen3-8b --fused --rows 16 --repeats 10 --compile fused)
        [[ -n ${TINY:-} ]] && size=(--tiny)
        figure passes "${bench[@]}" --only passes --batches 1 "${size[@]}"
        ;;
    decode)
        size=(--fused --max-new-tokens 128 --repeats 2) few=(--per-set 2 --hf-batches 0) many=(--per-set 10 --hf-batches 0)
        trees=(--trees 15 31 63) candidates=(--candidates 8) beside=(--hf-batches 2) batches=(8 32) compiled=(31 63) compiled_batches=(8 32)
        if [[ -n ${TINY:-} ]]; then
            size=(--max-new-tokens 4 --repeats 1) few=(--per-set 1 --hf-batches 0) many=("${few[@]}")
            trees=(--trees 3) candidates=(--candidates 2) beside=() batches=(2) compiled=() compiled_batches=()
        fi
        bench+=(--target "$folder" --drafter "$drafter" --prompts "$prompts"/eval/*.jsonl --only decode --skip "loop, adaptive" "${size[@]}")
        bench+=(--seconds $((${LIMIT:-300} - 60)))
        figure decode "${bench[@]}" "${few[@]}" --batches 1 --temperatures 0 "${trees[@]}" "${beside[@]}"
        figure decode-sampled "${bench[@]}" "${few[@]}" --batches 1 --temperatures 1
        for batch in "${batches[@]}"; do
            figure "decode-batch$batch" "${bench[@]}" "${many[@]}" --batches "$batch" --temperatures 0 "${trees[@]}" "${candidates[@]}"
            figure "decode-batch$batch-sampled" "${bench[@]}" "${many[@]}" --batches "$batch" --temperatures 1
        done
        for tree in "${compiled[@]}"; do # every number of rows is compiled anew, which takes minutes
            figure "decode-compiled$tree" "${bench[@]}" "${few[@]}" --batches 1 --temperatures 0 --trees "$tree" --compile fused
        done
        for batch in "${compiled_batches[@]}"; do
            figure "decode-batch$batch-compiled" "${bench[@]}" "${many[@]}" --batches "$batch" --temperatures 0 --trees 31 --compile fused
        done
        ;;
    large)
        shape=(--shapes qwen3-8b --sequences 4 --anchors 64 --length 2048 --steps 10)
        [[ -n ${TINY:-} ]] && shape=(--shapes tiny --sequences 1 --anchors 2 --length 32 --steps 2 --warm-up 1)
        figure large "$python" "$examples/dry_run.py" "${shape[@]}" --training '{"distill":0.7,"optim_drafter":"muon"}' \
            --config '{"block_size":16,"injection_placement":"mlp","rewrite_layers":4}'
        ;;
    commands)
        read -ra some <<<"${COMMANDS:-}"
        figure "commands${COMMANDS:+-${COMMANDS// /-}}" "$python" "$here/measure_commands.py" --target "$folder" --drafter "$drafter" \
            --prompts "$prompts" ${some:+--parts "${some[@]}"} ${TINY:+--tiny}
        ;;
    pair) LIMIT=$((3 * ${LIMIT:-300})) figure pair "$python" "$here/measure_pair.py" --target "$folder" --drafter "$drafter" --sequences "${SEQUENCES:-$out/train.npz}" ${TINY:+--tiny} ;;
    *) echo "expected parts among kernels, passes, decode, large, commands and pair; found '$part'." >&2 && exit 1 ;;
    esac
done
((${#failed[@]} == 0)) || { echo "not measured: ${failed[*]}; see their .log in $out." >&2 && exit 1; }
