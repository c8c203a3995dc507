#!/usr/bin/env bash
# Lint, types and all tests, two files at a time. Usage: bash scripts/test.sh [arguments of pytest, such as -n 0 for one]; the slow
# tests: bash scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment test

echo "== format and lint"
ruff format --check .
ruff check .
echo "== names and sentences (docs/writing.md)"
python -m toolkit.language
echo "== types, beside what follows until the tests begin"
mypy &
types=$!
echo "== the generated pages are up to date"
python -m toolkit.config_reference --check
python -m toolkit.what_is_proved --check
echo "== the site: no dead link, every page in its navigation"
bash scripts/docs.sh
echo "== a browser, in which pages are looked at"
if ! command -v chromium chromium-browser google-chrome >/dev/null && command -v apt-get >/dev/null && (($(id -u) == 0)); then
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium) ||
    echo "chromium could not be installed: tests of pages in a browser are skipped" >&2
fi
wait "$types"
echo "== tests"
unset PYTHONDONTWRITEBYTECODE # tests start hundreds of commands: none of them reads our sources again
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-$(python -c "from mindllm.jobs import environment; print(*environment.allocation_variables().values())")}"
pytest=(python -m pytest -n 2 --dist loadfile)
if (($#)); then
  "${pytest[@]}" "$@"
  exit
fi
# In three parts, each with processes of its own: MindSpore keeps what it has compiled, and compiles the slower the more that is.
compiled=(tests/compiled tests/verify tests/dry_run tests/prove tests/jobs tests/planning)
models=(tests/families tests/generate tests/models tests/parity tests/finetune tests/quantize)
failed=0
"${pytest[@]}" "${compiled[@]}" || failed=1
"${pytest[@]}" "${models[@]}" || failed=1
"${pytest[@]}" tests "${compiled[@]/#/--ignore=}" "${models[@]/#/--ignore=}" || failed=1
exit "$failed"
