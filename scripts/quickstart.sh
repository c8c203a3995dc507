#!/usr/bin/env bash
# Trains a small Llama on the Python standard library's own source: install, prepare, train, evaluate, write code.
# What is done already is skipped. Usage: bash scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment all

config=configs/llama2/pretrain_llama2_tiny.yaml
output=output/llama2_tiny

echo "== corpus: the Python standard library's source, and a tokenizer trained on it"
mindllm data --python-stdlib --output-prefix data/stdlib/corpus \
  --tokenizer data/stdlib/tokenizer.json --train-tokenizer 4096 --workers 2

if compgen -G "$output/checkpoint/llm-*" > /dev/null; then
  echo "== training: going on from the newest checkpoint in $output (remove the directory to start again)"
else
  echo "== training"
fi
python run_llm.py --config "$config" --resume_training auto
last=$(ls -d "$output"/checkpoint/llm-* | grep -E 'llm-[0-9]+$' | sort -V | tail -n 1)
mindllm loss-curve "$output" --output "$output/loss_curve.png"

echo "== held-out text"
python run_llm.py --config "$config" --run_mode eval --load_checkpoint "$last"

echo "== a generated piece of code"
python run_llm.py --config "$config" --run_mode predict --load_checkpoint "$last" \
  --input_data "def read_config(path):" --do_sample --generation.temperature=0.7 --generation.top_k=40

echo "== done: checkpoint $last, loss curve $output/loss_curve.png, metrics $output/metrics.jsonl"
