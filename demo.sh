#!/usr/bin/env bash
# Install, prepare a corpus, train softmax, SSMax on QK-norm and LSSAR, compare their loss at 1x to 16x the training
# length.
#
#   ./demo.sh           five to eight minutes on two CPU cores, after installation
#   ./demo.sh --quick   under 2 minutes: the same steps with barely trained models (for CI)
#
# A second call reuses finished steps; remove runs/demo* or runs/quick* to start over.
set -euo pipefail
trap 'exit 130' INT TERM  # train.py saves and exits with 0: the next step would start
cd "$(dirname "$0")"
. ./environment.sh

case "${1:-}" in
    "") prefix=demo; steps=(); eval_tokens=131072 ;;
    --quick) prefix=quick; steps=(--train.max-steps 40 --optimizer.warmup-steps 10 --train.val-tokens 16384); eval_tokens=16384 ;;
    *) echo "error: $1: expected nothing or --quick" >&2; exit 2 ;;
esac
softmax=runs/${prefix}_softmax ssmax=runs/${prefix}_ssmax lssar=runs/${prefix}_lssar picture=runs/$prefix.png

echo "== 1/6  environment"
environment requirements.txt
echo "== 2/6  corpus: the Python standard library's sources, as bytes -> data/python_bytes"
$PYTHON -m data.python_source
echo "== 3/6  train softmax attention -> $softmax"
$PYTHON train.py configs/demo_softmax.toml --name ${prefix}_softmax ${steps[@]+"${steps[@]}"}
echo "== 4/6  train SSMax on QK-norm -> $ssmax"
$PYTHON train.py configs/demo_ssmax.toml --name ${prefix}_ssmax ${steps[@]+"${steps[@]}"}
echo "== 5/6  train LSSAR, p raised to 15 -> $lssar"
$PYTHON train.py configs/demo_lssar.toml --name ${prefix}_lssar ${steps[@]+"${steps[@]}"}
echo "== 6/6  validation loss at 1x to 16x the training length -> $picture"
if [ -s runs/$prefix.txt ] && [ "$picture" -nt $softmax/checkpoints ] && [ "$picture" -nt $ssmax/checkpoints ] &&
    [ "$picture" -nt $lssar/checkpoints ]; then
    cat runs/$prefix.txt
else
    $PYTHON eval_length.py $softmax $ssmax $lssar --tokens $eval_tokens --replace --out "$picture" | tee runs/$prefix.txt
fi
echo "== done"
echo "curves    $softmax/metrics.jsonl and so on"
echo "tables    $softmax/eval_length.json and so on"
echo "picture   $picture"
echo "try       $PYTHON sample.py $lssar --prompt 'def '"
