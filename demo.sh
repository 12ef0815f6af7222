#!/usr/bin/env bash
# Install, prepare a corpus, train softmax and LSSAR, and compare their loss at 1x to 16x the training length.
#
#   ./demo.sh           about eight minutes on two CPU cores, after installation
#   ./demo.sh --quick   under 2 minutes: the same steps with barely trained models (for CI)
#
# A second call reuses finished steps; remove runs/demo* or runs/quick* to start over.
set -euo pipefail
cd "$(dirname "$0")"
. ./environment.sh

case "${1:-}" in
    "") prefix=demo; steps=(); eval_tokens=131072 ;;
    --quick) prefix=quick; steps=(--train.max-steps 40 --optimizer.warmup-steps 10 --train.val-tokens 16384); eval_tokens=16384 ;;
    *) echo "error: $1: expected nothing or --quick" >&2; exit 2 ;;
esac
softmax=runs/${prefix}_softmax lssar=runs/${prefix}_lssar picture=runs/$prefix.png

echo "== 1/5  environment"
environment requirements.txt
echo "== 2/5  corpus: the Python standard library's sources, as bytes -> data/python_bytes"
$PYTHON -m data.python_source
echo "== 3/5  train softmax attention -> $softmax"
$PYTHON train.py configs/demo_softmax.toml --name ${prefix}_softmax ${steps[@]+"${steps[@]}"}
echo "== 4/5  train LSSAR, p = 15 -> $lssar"
$PYTHON train.py configs/demo_lssar.toml --name ${prefix}_lssar ${steps[@]+"${steps[@]}"}
echo "== 5/5  validation loss at 1x to 16x the training length -> $picture"
if [ -s runs/$prefix.txt ] && [ "$picture" -nt $softmax/checkpoints ] && [ "$picture" -nt $lssar/checkpoints ]; then
    cat runs/$prefix.txt
else
    $PYTHON eval_length.py $softmax $lssar --tokens $eval_tokens --out "$picture" | tee runs/$prefix.txt
fi
echo "== done"
echo "curves    $softmax/metrics.jsonl, $lssar/metrics.jsonl"
echo "tables    $softmax/eval_length.json, $lssar/eval_length.json"
echo "picture   $picture"
echo "try       $PYTHON sample.py $lssar --prompt 'def '"
