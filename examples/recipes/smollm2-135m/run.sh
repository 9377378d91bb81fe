#!/usr/bin/env bash
# Everything behind the figures for SmolLM2-135M-Instruct, on one host with GPUs; given again, it goes on where it was.
#
#   examples/recipes/smollm2-135m/run.sh SmolLM2-135M-Instruct.gguf prompts/ out/
#
# prompts/ holds train/*.jsonl and eval/*.jsonl, lines of {"turns": [...]}. The target answers them (gen*/), so many tokens
# of that become data (train.npz, and final.npz for the longest training), then every GPU takes its share of the lists of
# drafters beside this file; results/ has one JSON each, and the weights of those in SAVE. On two CPU cores: TINY=1.
#   GPUS="0 1 2 3"   which GPUs   LISTS="final finalists parts settings"   which lists, dealt to them in turn
#   SOURCES=...      more npz files of sequences, a name or pattern a line (names may hold spaces): SOURCES=$(ls older/*.npz)
#   SAVE="final"     whose weights are kept   VARIANTS=folder/   of lists, instead of this one
#   SECONDS_EACH=600 start no drafter later than this on any GPU
set -euo pipefail
(($# == 3)) || {
    echo "expected a target, a folder of prompts and one for the results; found $# arguments. See the head of $0." >&2
    exit 1
}
target=$1 prompts=$2 out=$3 here=$(cd "$(dirname "$0")" && pwd)
mapfile -t more < <(grep . <<<"${SOURCES:-}")
gpus=(${GPUS:-0 1 2 3}) lists=(${LISTS:-final finalists parts settings})
examples=$here/../.. python=${PYTHON:-python3}
write=(--own 6144 --dialogues 4096) train=(--max-length 640) tokens=(14e6 18e6)
if [[ -n ${TINY:-} ]]; then
    write=(--own 4 --dialogues 2 --batch 4 --new-tokens 16 --length 320 --longest 500 --per-set 1 --evaluate-length 96)
    train=(--max-length 64) tokens=(2e3 3e3)
fi
mkdir -p "$out/results"
set -m # every job in a process group of its own, which ends when this script does
trap 'for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done' EXIT
for gpu in "${gpus[@]}"; do
    [[ -n ${TINY:-} ]] || CUDA_VISIBLE_DEVICES=$gpu "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2>/dev/null || {
        echo "expected a GPU $gpu on this host; found none. Name those to use: GPUS=\"0 1\"." >&2
        exit 1
    }
done
finish() { # wait for all background jobs; fail if one did
    local job failed=0
    for job in $(jobs -p); do wait "$job" || failed=1; done
    ((failed == 0)) || { tail -n 5 "$out"/*.log; exit 1; }
}
for rank in "${!gpus[@]}"; do
    [[ -f $out/gen$rank/train.npz ]] || CUDA_VISIBLE_DEVICES=${gpus[rank]} "$python" "$examples/bulk_generate.py" \
        --target "$target" --prompts "$prompts/train/*.jsonl" --evaluate "$prompts/eval/*.jsonl" "${write[@]}" \
        --rank "$rank" --world "${#gpus[@]}" --out "$out/gen$rank" >"$out/gen$rank.log" 2>&1 &
done
finish
cat "$out"/gen*/eval.jsonl >"$out/eval.jsonl"
names=(train final)
for i in 0 1; do
    [[ -f $out/${names[i]}.npz ]] || "$python" "$examples/select_sequences.py" --sources "$out/gen*/train.npz" "${more[@]}" \
        --tokens "${tokens[i]}" --out "$out/${names[i]}.npz"
done
for i in "${!gpus[@]}"; do
    (for ((n = i; n < ${#lists[@]}; n += ${#gpus[@]})); do
        list=${lists[n]} data=train
        [[ $list == final* ]] && data=final
        CUDA_VISIBLE_DEVICES=${gpus[i]} "$python" "$examples/compare_drafters.py" --target "$target" --train "$out/$data.npz" \
            --continuations "$out/eval.jsonl" --variants "${VARIANTS:-$here}/$list.json" "${train[@]}" --save ${SAVE:-final} \
            --seconds "${SECONDS_EACH:-1e9}" --out "$out/results"
    done) >"$out/gpu${gpus[i]}.log" 2>&1 &
done
finish
grep -h '^==' "$out"/gpu*.log || echo "no drafter was measured in this time"
