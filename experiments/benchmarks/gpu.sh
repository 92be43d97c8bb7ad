#!/usr/bin/env bash
# The learner on one large GPU in under ten minutes, without a network: attention self-test, then the compiled step of a
# Qwen2.5-1.5B with random weights, rank 1, rows of 16k tokens, bfloat16. Wants python with jax for CUDA, flax and optax.
#
#   experiments/benchmarks/gpu.sh [OUTPUT_FOLDER]        PYTHON names another python than `python`
#
# Each line that it prints is a JSON object; they are also in OUTPUT_FOLDER/gpu.jsonl.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-.}
mkdir -p "$out"
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || true
timeout 540 "${PYTHON:-python}" -m experiments.benchmarks.gpu | tee "$out/gpu.jsonl"
