#!/usr/bin/env bash
# Checks this node before a run; arguments in the order of scripts/msrun_launcher.sh.
usage='usage: bash scripts/preflight.sh CONFIG [options]                                   one machine, all devices of CONFIG
       bash scripts/preflight.sh CONFIG WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK [options]
                                                      on every machine at the same time, each with its own NODE_RANK
options are those of mindllm preflight (--json, --directory DIR, --timeout SECONDS) and keys of the configuration'
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  echo "$usage"
  exit 0
fi
if [ $# -lt 1 ]; then
  echo "$usage" >&2
  exit 2
fi
config=$1
shift
options=()
if [ $# -ge 5 ] && [ "${1#--}" = "$1" ]; then
  options=(--workers "$1" --local_workers "$2" --master_addr "$3" --port "$4" --node_rank "$5")
  shift 5
fi
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  PATH=$root/.venv/bin:$PATH
fi
exec python -m mindllm preflight --config "$config" ${options[@]+"${options[@]}"} "$@"
