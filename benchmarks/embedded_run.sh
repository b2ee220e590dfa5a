#!/usr/bin/env bash
# Whole training runs of config=grpo_math, plainly and with reuse, one after the other on a quiet machine.
# Usage: benchmarks/embedded_run.sh OUTPUT_DIR
set -euo pipefail
out=${1:?usage: benchmarks/embedded_run.sh OUTPUT_DIR}
python=${PYTHON:-.venv/bin/python}
common="config=grpo_math output_dir=$out rollout.measure_every=0 trainer.eval_prompts=0 trainer.log_completions=0"
$python -m specrl.train $common name=plain rollout.acceptance=off
$python -m specrl.train $common name=exact report.baseline=$out/plain
$python -m specrl.train $common name=plain_replay1 rollout.acceptance=off rollout.replay=1
$python -m specrl.train $common name=exact_replay1 rollout.replay=1 report.baseline=$out/plain_replay1
