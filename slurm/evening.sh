#!/usr/bin/env bash
# One evening on 8 GPUs: does this machine train as it should, at which rate, and what do three normalisers lose
# beyond their training length?
#
#   slurm/evening.sh                                # after the data (README); the same call goes on after a stop
#   slurm/evening.sh --train.max-steps 4768         # options of train.py for the three models
#   PROCESSES=2 CHECK=0 RATE_STEPS=20 slurm/evening.sh --base tiny.toml        # a rehearsal on a CPU
#
# 1. check    20 steps: processes, tokens a second, memory
# 2. rates    softmax at three peak rates, 2,000 steps, where llm.c has published a loss
# 3. train    softmax, SSMax on QK-norm and LSSAR at the best of them
# 4. lengths  their loss at 1x to 16x the training length
#
# Everything is in runs/evening, and its rows together in runs/evening/rows/.
# Exit status: 0 done; 2 a wrong option; 3 the processes do not start (NCCL); 4 out of memory; 5 no rate is on
# llm.c's curve (CHECK=0 goes on); 6 another failure, its message above; 130 interrupted.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PROCESSES=${PROCESSES:-8}
RATES=${RATES:-"3e-4 6e-4 1.2e-3"}
RATE_STEPS=${RATE_STEPS:-2000}
EVAL_TOKENS=${EVAL_TOKENS:-1048576}
folder=runs/evening
common=(--log.dir $folder)
# the three models' base also holds for the check and the rates; their other options do not
case "${1:-}" in --base) common+=("$1" "$2"); shift 2 ;; esac
mkdir -p $folder
trap 'exit 130' INT TERM  # a stopped run saves and ends with status 0: the next one must not start

end() { echo "error: $2" >&2; exit "$1"; }

sweep() {
    $PYTHON sweep.py "$@" "${common[@]}" --nproc "$PROCESSES" || end $(($? == 2 ? 2 : 6)) "the sweep has failed (above)"
}

echo "== 1. check: 20 steps on $PROCESSES processes"
log=$folder/check.log
$PYTHON -m torch.distributed.run --standalone --nproc_per_node="$PROCESSES" train.py configs/softmax.toml \
    --name check --train.max-steps 20 --optimizer.warmup-steps 10 --log.every 5 "${common[@]}" 2>&1 | tee $log
status=$?
if grep -qi 'out of memory' $log; then
    end 4 "out of memory ($log): a smaller train.micro_batch in a file of yours, and --base FILE"
elif [ $status != 0 ] && grep -q '^error: ' $log; then
    end 2 "the check did not start (above)"
elif [ $status != 0 ] && grep -qE 'NCCL|nccl|ProcessGroup|rendezvous|Rendezvous' $log; then
    end 3 "the processes do not reach each other ($log): NCCL_DEBUG=INFO $0 says why"
elif [ $status != 0 ]; then
    end 6 "the check has failed ($log)"
fi

echo "== 2. softmax at peak rates of $RATES, $RATE_STEPS steps"
# the rate stays at its peak after the warm-up, as it nearly does in the first steps of a long cosine
# shellcheck disable=SC2086
sweep configs/softmax.toml --optimizer.lr $RATES --train.max-steps "$RATE_STEPS" \
    --optimizer.warmup-steps $((RATE_STEPS < 1400 ? RATE_STEPS / 2 : 700)) --optimizer.schedule constant --eval-tokens 0
best=$($PYTHON - $folder "$RATE_STEPS" "${CHECK:-1}" <<'EOF'
import sys, tomllib
from pathlib import Path

from infra.files import read_jsonl
from training.validation import llm_c_loss

folder, steps, must_hold = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] != "0"
losses = {}
for run in folder.glob("softmax_lr=*"):
    rate = tomllib.loads((run / "config.toml").read_text())["optimizer"]["lr"]
    losses[rate] = [line["val_loss"] for line in read_jsonl(run / "metrics.jsonl") if "val_loss" in line][-1]
for rate, loss in sorted(losses.items()):
    print(f"rate {rate:g}: {loss:.4f}", file=sys.stderr)
best = min(losses, key=losses.get)
expected = llm_c_loss(steps)
print(f"llm.c at step {steps}: {expected:.4f}", file=sys.stderr)
if must_hold and losses[best] > expected + 0.1:
    sys.exit(5)
print(best)
EOF
)
[ $? = 0 ] || end 5 "no rate is within 0.1 of llm.c's loss at step $RATE_STEPS: look at the data and at $folder/*/metrics.jsonl"

echo "== 3 and 4. softmax, SSMax on QK-norm and LSSAR at $best, and their losses at 1x to 16x"
models=(configs/softmax.toml configs/variants/ssmax_qk_norm.toml configs/lssar.toml)
sweep "${models[@]}" --optimizer.lr "$best" "$@" --eval-tokens "$EVAL_TOKENS"
mkdir -p $folder/rows
$PYTHON measure.py $folder/softmax $folder/ssmax_qk_norm $folder/lssar --out $folder/rows || exit 6
