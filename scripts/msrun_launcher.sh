#!/usr/bin/env bash
# Trains on several devices of this machine; arguments in the order of MindFormers' script of this name.
usage='usage: bash scripts/msrun_launcher.sh "run_llm.py --config FILE [options]" WORKER_NUM [PORT [LOG_DIR [JOIN [TIMEOUT]]]]

  WORKER_NUM  processes, one for each device that parallel_config describes
  PORT        on which they find each other (default: a free one; on Ascend 8118)
  LOG_DIR     receives worker_0.log, worker_1.log, ... (default: output/msrun_log)
  JOIN        True: waits for the end (the default); False: returns at once, the job goes on
  TIMEOUT     seconds after which they give up finding each other (default: 7200)

example: bash scripts/msrun_launcher.sh "run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml \
  --use_parallel true --parallel_config.data_parallel=2 --batch_size 8" 2

Where there are Ascend devices, this calls the msrun of MindSpore, otherwise python -m mindllm.launch, which watches its processes
more closely. SIGTERM and Ctrl-C stop all ranks after the same step, with a checkpoint.'
set -euo pipefail

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  echo "$usage"
  exit 0
fi
if [ $# -lt 2 ] || [ $# -gt 6 ]; then
  echo "$usage" >&2
  exit 2
fi
command=$1 workers=$2 port=${3:-0} log_dir=${4:-output/msrun_log} join=${5:-True} timeout=${6:-7200}
case $join in
  [Tt]rue | [Ff]alse) ;;
  *)
    echo "error: JOIN is $join; write True or False" >&2
    exit 2
    ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  PATH=$root/.venv/bin:$PATH # what scripts/quickstart.sh has installed
fi
if compgen -G '/dev/davinci[0-9]*' > /dev/null; then
  [ "$port" = 0 ] && port=8118
  read -r -a words <<< "$command"
  launch=(msrun --worker_num="$workers" --local_worker_num="$workers" --master_port="$port" --log_dir="$log_dir"
    --join=True --cluster_time_out="$timeout" "${words[@]}")
else
  launch=(python -m mindllm.launch --workers "$workers" --port "$port" --log_dir "$log_dir" --timeout "$timeout" "$command")
fi
case $join in
  [Tt]rue) exec "${launch[@]}" ;;
  *)
    mkdir -p "$log_dir"
    nohup "${launch[@]}" > "$log_dir/launch.log" 2>&1 < /dev/null &
    echo "started as process $!; watch $log_dir/launch.log; to stop it after a step: kill $!"
    ;;
esac
