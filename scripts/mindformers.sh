#!/usr/bin/env bash
# Makes a virtual environment with MindFormers, the peer that mindllm is measured against.
usage='usage: bash scripts/mindformers.sh [DIRECTORY]

  DIRECTORY  where the environment is made (default: .venv-mindformers)

MindFormers 1.8.0 on MindSpore 2.7.2, about 3 GB, without those of its requirements that training does not import. Afterwards, on a
machine without a device:

  mindllm offline -- .venv-mindformers/bin/python run_mindformer.py --config theirs.yaml

examples/mindformers/ has a run_mindformer.py and a YAML for it.'
set -euo pipefail

case ${1:-} in
  -h | --help)
    echo "$usage"
    exit 0
    ;;
  -*)
    echo "error: unknown option $1; valid: --help" >&2
    exit 2
    ;;
esac
if [ $# -gt 1 ]; then
  echo "error: one directory is made, and $# are given" >&2
  exit 2
fi

cd "$(dirname "$0")/.."
source scripts/environment.sh
environment=${1:-.venv-mindformers}
stamp=$environment/.installed
if [ -f "$stamp" ]; then
  echo "MindFormers is in $environment"
  exit 0
fi
unset PYTHONPATH VIRTUAL_ENV
if [ ! -x "$environment/bin/python" ]; then
  python=$(find_python) || exit 2
  "$python" -m venv "$environment"
fi
install() {
  "$environment/bin/python" -m pip install --quiet "$@"
}
echo "== installing MindFormers 1.8.0 and MindSpore 2.7.2 into $environment (3 GB, a few minutes)"
install "mindspore==2.7.2" "numpy<2"
install --no-deps "mindformers==1.8.0" "mindpet==1.0.4" # both pin what training does not import
# What its modules import when they are loaded, in the releases it was written for.
install "transformers==4.57.1" "tokenizers==0.22.1" "huggingface-hub<1" "datasets>=4,<5" "pyarrow==19.0.0" "numpy<2" \
  "opencv-python-headless<4.12" "setuptools<81" "nltk==3.9.1" sentencepiece tiktoken jieba rouge_chinese ftfy regex \
  deprecated tensorboardX setproctitle jinja2 pyyaml pybind11
"$environment/bin/python" -c 'import mindformers' > "$environment/import.log" 2>&1 || {
  tail -n 3 "$environment/import.log" >&2
  echo "error: MindFormers is installed in $environment, but cannot be imported" >&2
  exit 1
}
touch "$stamp"
echo "MindFormers is in $environment"
