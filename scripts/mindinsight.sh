#!/usr/bin/env bash
# Shows the scalars of a run in MindInsight's dashboard, on this machine only.
usage='usage: bash scripts/mindinsight.sh DIR [--port N]

  DIR     output directory of a run whose callbacks hold SummaryMonitor; or a directory of several summary directories, which
          are shown beside each other
  --port  where the dashboard is served (default: 8080)

example: bash scripts/mindinsight.sh output/llama2_tiny

MindInsight is installed into .venv-mindinsight, the first time (0.5 GB): it needs older libraries than MindSpore. Ctrl-C ends it.'
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

directory='' port=8080
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      echo "$usage"
      exit 0
      ;;
    --port) port=${2:-} && shift ;;
    --port=*) port=${1#--port=} ;;
    -*) fail "unknown option $1; valid: --port, --help" ;;
    *) [ -z "$directory" ] || fail "one directory is shown, $directory and $1 are given" && directory=$1 ;;
  esac
  shift || fail "--port needs a number"
done
if [ -z "$directory" ]; then
  echo "$usage" >&2
  exit 2
fi
[[ $port =~ ^[0-9]+$ ]] && [ "$port" -ge 1024 ] && [ "$port" -le 65535 ] || fail "--port is $port; write 1024 to 65535"
[ -d "$directory" ] || fail "$directory is no directory"
if [ -z "$(find "$directory" -maxdepth 2 -name 'events.out.events.summary.*' -print -quit)" ]; then
  fail "$directory and its subdirectories hold no summary file; add '- type: SummaryMonitor' to callbacks and train"
fi
directory=$(cd "$directory" && pwd)

cd "$(dirname "$0")/.."
source scripts/environment.sh
environment=.venv-mindinsight
if [ ! -f "$environment/.installed" ]; then
  python=$(find_python) || exit 2
  echo "== installing MindInsight into $environment (0.5 GB, a few minutes)"
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet mindinsight==2.3.1 "numpy<2" # it counts on names that numpy 2 has dropped
  touch "$environment/.installed"
fi
PATH=$PWD/$environment/bin:$PATH # where it looks for its web server
unset PYTHONPATH VIRTUAL_ENV

workspace=$(mktemp -d)
stop() {
  trap '' INT TERM
  mindinsight stop --port "$port" > /dev/null 2>&1 || true
  rm -rf "$workspace"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 0' TERM
if ! mindinsight start --workspace "$workspace" --port "$port" --summary-base-dir "$directory" > "$workspace/start.log" 2>&1 ||
  ! grep -q success "$workspace/start.log"; then
  cat "$workspace/start.log" >&2
  echo "error: MindInsight did not start; is port $port in use? give another one with --port" >&2
  exit 1
fi
echo "MindInsight shows $directory at http://127.0.0.1:$port (Ctrl-C ends it)"
while sleep 1; do :; done
