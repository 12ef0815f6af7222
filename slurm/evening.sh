#!/usr/bin/env bash
# One evening on 8 GPUs: does this machine train as it should, at which rate, and what do three normalisers lose
# beyond their training length?
#
#   slurm/evening.sh                                # after the data (README); the same call goes on after a stop
#   slurm/evening.sh --train.max-steps 4768         # options of train.py for the three models
#   PROCESSES=2 CHECK=0 RATE_STEPS=20 slurm/evening.sh --base tiny.toml        # a rehearsal on a CPU
#
# 1. check    20 steps of softmax: processes, tokens a second, memory; a dry run of the two others
# 2. rates    softmax at three peak rates, 2,000 steps, where llm.c has published a loss
# 3. train    softmax, SSMax on QK-norm and LSSAR at the best of them
# 4. lengths  their loss at 1x to 16x the training length
#
# Everything is in runs/evening, and its rows together in runs/evening/rows/. --base is that of all runs.
# Exit status: 0 done; 2 a wrong option; 3 the processes do not start (NCCL); 4 out of memory; 5 no rate is on
# llm.c's curve (CHECK=0 goes on); 6 another failure, its message above; 130 interrupted.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=.venv/bin/python; [ -x $PYTHON ] || PYTHON=python; fi
PROCESSES=${PROCESSES:-8}
RATES=${RATES:-"3e-4 6e-4 1.2e-3"}
RATE_STEPS=${RATE_STEPS:-2000}
EVAL_TOKENS=${EVAL_TOKENS:-1048576}
folder=runs/evening
log=$folder/check.log
models=(configs/softmax.toml configs/variants/ssmax_qk_norm.toml configs/lssar.toml)
common=(--log.dir $folder)
options=()
while [ $# -gt 0 ]; do
    case $1 in
        --base) common+=(--base "${2:-}"); shift ;;
        --base=*) common+=("$1") ;;
        *) options+=("$1") ;;
    esac
    shift
done

end() { echo "error: $2" >&2; exit "$1"; }

# bash would end the command in front before it minds a signal: what takes long runs behind, and is waited for
child=
stop() {
    trap '' INT TERM HUP
    if [ -n "$child" ]; then kill -TERM "$child" 2> /dev/null; fi
    wait
    exit 130
}
trap stop INT TERM HUP

check() {
    : > $log
    $PYTHON -m torch.distributed.run --standalone --nproc_per_node="$PROCESSES" train.py "$@" "${common[@]}" > $log 2>&1 &
    child=$!
    tail -n +1 -f --pid=$child $log &
    wait $child
    local status=$?
    child=
    wait  # for the last lines
    if [ $status = 0 ]; then return; fi
    if grep -qi 'out of memory' $log; then
        end 4 "out of memory ($log): a smaller train.micro_batch in a file of yours, and --base FILE"
    elif grep -qE '^error: (rank [0-9]+: )?(another process exited|MASTER_ADDR)' $log; then
        end 3 "the processes do not reach each other ($log): NCCL_DEBUG=INFO $0 says why"
    elif grep -q '^error: ' $log; then
        end 2 "the check did not start (above)"
    elif grep -qE 'NCCL|nccl|ProcessGroup|rendezvous|Rendezvous' $log; then
        end 3 "the processes do not reach each other ($log): NCCL_DEBUG=INFO $0 says why"
    fi
    end 6 "the check has failed ($log)"
}

sweep() {
    $PYTHON sweep.py "$@" "${common[@]}" --nproc "$PROCESSES" &
    child=$!
    wait $child
    status=$?
    child=
}

mkdir -p $folder
exec 9> $folder/.lock  # which sweep.py inherits: one that outlives this script holds it
flock -n 9 || end 6 "another call, or what one has left, is at work in $folder (ps: sweep.py)"

echo "== 1. check: 20 steps on $PROCESSES processes"
$PYTHON sweep.py "${models[@]}" "${options[@]}" "${common[@]}" --list > $folder/plan
[ $? != 2 ] || end 2 "a wrong option (above)"
check "${models[0]}" --name check --train.max-steps 20 --optimizer.warmup-steps 10 --log.every 5
for model in "${models[@]:1}"; do
    check "$model" --dry-run
done

echo "== 2. softmax at peak rates of $RATES, $RATE_STEPS steps"
# the rate stays at its peak after the warm-up, as it nearly does in the first steps of a long cosine;
# twice, so that a single rate is a list, too
# shellcheck disable=SC2086
sweep "${models[0]}" --optimizer.lr $RATES $RATES --train.max-steps "$RATE_STEPS" \
    --optimizer.warmup-steps $((RATE_STEPS < 1400 ? RATE_STEPS / 2 : 700)) --optimizer.schedule constant --eval-tokens 0
case $status in 0 | 1) ;; *) end 2 "the sweep has failed (above)" ;; esac  # 1: a rate may have diverged
# shellcheck disable=SC2086
best=$($PYTHON -m lab.choose_rate $folder "$RATE_STEPS" $RATES)
case $? in
    0) ;;
    5) [ "${CHECK:-1}" = 0 ] || end 5 "no rate is within 0.1 of llm.c's loss at step $RATE_STEPS: look at the data" ;;
    *) end 6 "no rate can be chosen (above)" ;;
esac

echo "== 3 and 4. softmax, SSMax on QK-norm and LSSAR at $best, and their losses at 1x to 16x"
sweep "${models[@]}" --optimizer.lr "$best" "${options[@]}" --eval-tokens "$EVAL_TOKENS"
[ $status = 0 ] || end $((status == 2 ? 2 : 6)) "the sweep has failed (above)"
$PYTHON sweep.py "${models[@]}" --optimizer.lr "$best" "${options[@]}" "${common[@]}" --list > $folder/plan || exit 6
! grep -q 'to run$' $folder/plan || exit 130
mkdir -p $folder/rows
# shellcheck disable=SC2046
$PYTHON measure.py $(awk '{print $2}' $folder/plan) --out $folder/rows || exit 6
