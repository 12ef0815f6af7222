#!/usr/bin/env bash
# Install, prepare a corpus, train softmax, SSMax on QK-norm, LSSAR and windows + FoX, and draw a picture:
# their loss at 1x to 16x the training length, beside softmax with a rolling window of that length.
#
#   ./demo.sh           up to 10 minutes on two CPU cores, after installation
#   ./demo.sh --quick   two minutes: the same steps with barely trained models (for CI)
#
# A second call reuses finished steps; remove runs/demo* or runs/quick* to start over.
set -euo pipefail
cd "$(dirname "$0")"
. ./environment.sh

case "${1:-}" in
    "") prefix=demo; steps=(); eval_tokens=65536 ;;
    --quick) prefix=quick; steps=(--train.max-steps 40 --optimizer.warmup-steps 10 --train.val-tokens 16384); eval_tokens=16384 ;;
    *) echo "error: $1: expected nothing or --quick" >&2; exit 2 ;;
esac
picture=runs/$prefix.png
cores=$(getconf _NPROCESSORS_ONLN)

pids=()
# train.py saves and ends with status 0 when it is told to stop: without this the next step would start
stop() {
    trap '' INT TERM
    if [ ${#pids[@]} -gt 0 ]; then
        kill -TERM "${pids[@]}" 2> /dev/null || true
        wait
    fi
    exit 130
}
trap stop INT TERM

named() { while IFS= read -r line; do echo "$1 | $line"; done; }

# Two models at a time, each on half of the cores.
train_two() {
    local model pid
    pids=()
    for model in "$@"; do
        echo "== train configs/demo_$model.toml -> runs/${prefix}_$model"
        OMP_NUM_THREADS=$(((cores + 1) / 2)) $PYTHON train.py configs/demo_$model.toml --name ${prefix}_$model \
            ${steps[@]+"${steps[@]}"} > >(named $model) 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid"
    done
    pids=()
}

echo "== environment"
environment requirements.txt
echo "== corpus: the Python standard library's sources, as bytes -> data/python_bytes"
$PYTHON -m data.python_source
train_two softmax ssmax
train_two lssar hybrid
runs=(runs/${prefix}_softmax runs/${prefix}_ssmax runs/${prefix}_lssar runs/${prefix}_hybrid)
echo "== loss at 1x to 16x the training length -> $picture"
$PYTHON eval_length.py "${runs[@]}" --tokens $eval_tokens --missing --out "$picture"
echo "== done"
echo "picture   $picture"
echo "numbers   ${runs[0]}/rows.csv and so on; the table again: $PYTHON eval_length.py ${runs[*]} --draw"
echo "next      $PYTHON sample.py ${runs[2]} --prompt 'def '"
echo "          a formula of your own beside these: README.md, \"Add your own\""
