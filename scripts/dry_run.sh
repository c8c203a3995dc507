#!/usr/bin/env bash
# MindSpore's dry run of the first rank of every pipeline stage, without devices; arguments as users of MindFormers know them.
usage='usage: bash scripts/dry_run.sh CONFIG RANK_SIZE STAGES [options of python -m toolkit.dry_run]

  CONFIG     YAML of the run
  RANK_SIZE  devices of the cluster; must be what parallel_config multiplies to
  STAGES     pipeline stages; must be parallel_config.pipeline_stage

example: bash scripts/dry_run.sh configs/llama2/pretrain_llama2_70b.yaml 64 8

Logs and a page with what fills the memory are written to output_dryrun/. Exit code 0: all stages fit, 3: one does not, 2: wrong input.'
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  echo "$usage"
  exit 0
fi
if [ $# -lt 3 ]; then
  echo "$usage" >&2
  exit 2
fi
config=$1 rank_size=$2 stages=$3
shift 3
for number in "$rank_size" "$stages"; do
  if ! [[ $number =~ ^[1-9][0-9]*$ ]]; then
    echo "error: $number is no number of devices or stages" >&2
    exit 2
  fi
done

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  PATH=$root/.venv/bin:$PATH # what scripts/quickstart.sh has installed
fi
exec python -m toolkit.dry_run --config "$config" --rank_size "$rank_size" --stage_num "$stages" "$@"
