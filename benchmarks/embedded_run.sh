#!/usr/bin/env bash
# Whole training runs of config=grpo_math, one after the other on a quiet machine: plainly, with reuse, and with reuse and
# replayed noise. The first two draw the same tokens and are paired step by step; the third measures itself against plain
# decoding with its own keys on every fourth step.
# Usage: benchmarks/embedded_run.sh OUTPUT_DIR
set -euo pipefail
out=${1:?usage: benchmarks/embedded_run.sh OUTPUT_DIR}
python=${PYTHON:-.venv/bin/python}
common="config=grpo_math output_dir=$out trainer.log_completions=0"
$python -m specrl.train $common name=plain rollout.acceptance=off rollout.measure_every=0
$python -m specrl.train $common name=exact rollout.measure_every=0 report.baseline=$out/plain
$python -m specrl.train $common name=exact_replay1 rollout.replay=1 rollout.measure_every=4
