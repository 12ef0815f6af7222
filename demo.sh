#!/usr/bin/env bash
# Install, prepare a corpus, train softmax, SSMax on QK-norm, LSSAR and windows + FoX, and draw README's picture:
# their loss at 1x to 16x the training length, beside softmax with a rolling window of that length.
#
#   ./demo.sh           up to 20 minutes on two CPU cores, after installation
#   ./demo.sh --quick   two to five minutes: the same steps with barely trained models (for CI)
#
# A second call reuses finished steps; remove runs/demo* or runs/quick* to start over.
set -euo pipefail
trap 'exit 130' INT TERM  # train.py saves and exits with 0: the next step would start
cd "$(dirname "$0")"
. ./environment.sh

case "${1:-}" in
    "") prefix=demo; steps=(); eval_tokens=65536 ;;
    --quick) prefix=quick; steps=(--train.max-steps 40 --optimizer.warmup-steps 10 --train.val-tokens 16384); eval_tokens=16384 ;;
    *) echo "error: $1: expected nothing or --quick" >&2; exit 2 ;;
esac
picture=runs/$prefix.png

echo "== environment"
environment requirements.txt
echo "== corpus: the Python standard library's sources, as bytes -> data/python_bytes"
$PYTHON -m data.python_source
runs=()
for model in softmax ssmax lssar hybrid; do
    run=${prefix}_$model
    echo "== train configs/demo_$model.toml -> runs/$run"
    $PYTHON train.py configs/demo_$model.toml --name $run ${steps[@]+"${steps[@]}"}
    runs+=(runs/$run)
done
echo "== loss at 1x to 16x the training length -> $picture"
$PYTHON eval_length.py "${runs[@]}" --tokens $eval_tokens --missing --out "$picture"
echo "== done"
echo "curves    ${runs[0]}/metrics.jsonl and so on"
echo "numbers   ${runs[0]}/rows.csv and so on; the table again: $PYTHON eval_length.py ${runs[*]} --draw"
echo "picture   $picture"
echo "try       $PYTHON sample.py runs/${prefix}_lssar --prompt 'def '"
