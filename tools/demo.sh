#!/bin/bash
# Trains on real hand-written digits, as two nodes of two workers on this machine, is interrupted
# in mid-epoch by a real SIGTERM, and goes on at the next step.
set -u
cd "$(dirname "$0")/.." || exit
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
export HPC_DDP_RUNS=$runs

say() { printf '\n== %s\n' "$*"; }
field() {  # field EVENT NAME: what the journal's last such event says
    grep -h "\"event\": \"$1\"" "$runs"/digits/*/journal/rank-0.jsonl 2>/dev/null | tail -1 \
        | sed -n "s/.*\"$2\": \([0-9.]*\).*/\1/p"
}

say "hpc-ddp dry-run --nodes 2 --gpus-per-node 2 jobs/digits.py"
hpc-ddp dry-run --nodes 2 --gpus-per-node 2 jobs/digits.py --step-seconds 0.03 &
job=$!
while kill -0 $job 2>/dev/null && [ "$(field metrics step || echo 0)0" -lt 300 ]; do sleep 0.2; done

say "kill -TERM $job   (what a preempting Slurm would send)"
kill -TERM $job
wait $job
code=$?
[ $code = 75 ] || { echo "demo: expected exit code 75 after the signal, got $code" >&2; exit 1; }
stopped=$(field stopped step)
echo "stopped after step $stopped, exit code 75: it can go on"

run=$(echo "$runs"/digits/*)
say "hpc-ddp dry-run --run $run"
hpc-ddp dry-run --run "$run" || exit
first=$(field first_step step)
accuracy=$(sed -n 's/^test accuracy //p' "$run"/logs/attempt-1/local-0/rank-0.log)

say "the first attempt stopped after step $stopped, the second one began with step $first"
say "test accuracy $accuracy on 359 digits that were not trained on"
[ "$first" = $((stopped + 1)) ] || { echo "demo: it did not go on at the next step" >&2; exit 1; }
awk "BEGIN { exit !($accuracy >= 0.95) }" || { echo "demo: accuracy below 0.95" >&2; exit 1; }
