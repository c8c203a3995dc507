#!/usr/bin/env bash
# Trains on several devices, of one machine or of several; arguments in the order of MindFormers' script of this name.
usage='usage: bash scripts/msrun_launcher.sh [--restart N] "run_llm.py --config FILE [options]" ARGUMENTS

one machine: [WORKER_NUM [PORT [LOG_DIR [JOIN [TIMEOUT]]]]]
several, the same command on each with its own NODE_RANK:
  WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR [JOIN [TIMEOUT]]

  WORKER_NUM    processes in all, one for each device that parallel_config describes (default: 8)
  LOCAL_WORKER  those of this machine
  MASTER_ADDR   address of machine 0, where the others reach it
  MASTER_PORT   on which they find each other (one machine: default a free one; on Ascend 8118); without Ascend devices the
                port after it is used, too
  NODE_RANK     number of this machine, from 0
  LOG_DIR       receives worker_0.log, worker_1.log, ... (default: output/msrun_log)
  JOIN          True: waits for the end (the default); False: returns at once, the job goes on
  TIMEOUT       seconds after which they give up finding each other (default: 7200)
  --restart N   a job that fails is started again from its last good checkpoint, N times at most (default: 0)

examples:
  bash scripts/msrun_launcher.sh "run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml \
    --use_parallel true --parallel_config.data_parallel=2 --batch_size 8" 2
  bash scripts/msrun_launcher.sh --restart 3 "run_llm.py --config configs/llama2/pretrain_llama2_13b_16p.yaml" \
    16 8 192.168.1.10 8118 0 output/msrun_log True 7200   # and on the other machine with 1 instead of 0

run_llm.py and configs/ are found from any directory; paths of data and output are those of the directory you are in.
Where there are Ascend devices, the msrun of MindSpore starts the processes, otherwise python -m mindllm.launch does; that watches
them in both cases. SIGTERM and Ctrl-C stop all ranks after the same step, with a checkpoint.'
set -euo pipefail

restart=0 arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h)
      echo "$usage"
      exit 0
      ;;
    --restart)
      restart=${2:-}
      shift "$(($# > 1 ? 2 : 1))"
      ;;
    --restart=*)
      restart=${1#--restart=}
      shift
      ;;
    *)
      arguments+=("$1")
      shift
      ;;
  esac
done
set -- ${arguments[@]+"${arguments[@]}"}
if [ $# -eq 0 ]; then
  echo "$usage" >&2
  exit 2
fi

fail() {
  echo "error: $1; --help shows the arguments" >&2
  exit 2
}

# number NAME VALUE: a whole number, or the end
number() {
  [[ $2 =~ ^[0-9]+$ ]] || fail "$1 is '$2', not a number"
}

command=$1
shift
case $#:${1:-} in
  *:-*) fail "$1 is not WORKER_NUM; put the script and all its options in one pair of quotes: \"$command $1 ...\"" ;;
esac
if [ $# -le 5 ]; then
  workers=${1:-8} local=$workers address=127.0.0.1 port=${2:-0} node=0
  log_dir=${3:-output/msrun_log} join=${4:-True} timeout=${5:-7200}
elif [ $# -le 8 ]; then
  workers=$1 local=$2 address=$3 port=$4 node=$5 log_dir=$6 join=${7:-True} timeout=${8:-7200}
else
  fail "$# arguments behind the command, of which there are 8 at most"
fi
number WORKER_NUM "$workers"
number LOCAL_WORKER "$local"
number PORT "$port"
number NODE_RANK "$node"
number TIMEOUT "$timeout"
number --restart "$restart"
case $join in
  [Tt]rue | [Ff]alse) ;;
  *) fail "JOIN is '$join'; write True or False" ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  PATH=$root/.venv/bin:$PATH # what scripts/quickstart.sh has installed
fi
launch=(python -m mindllm.launch --workers "$workers" --local_workers "$local" --master_addr "$address" --port "$port"
  --node_rank "$node" --log_dir "$log_dir" --timeout "$timeout" --restart "$restart")
if compgen -G '/dev/davinci[0-9]*' > /dev/null; then
  launch+=(--msrun)
fi
launch+=("$command")
case $join in
  [Tt]rue) exec "${launch[@]}" ;;
  *)
    "${launch[@]}" --check # a mistake is told here, not in a log
    mkdir -p "$log_dir"
    nohup "${launch[@]}" > "$log_dir/launch.log" 2>&1 < /dev/null &
    echo "started as process $!; watch $log_dir/launch.log; to stop it after a step: kill $!"
    ;;
esac
