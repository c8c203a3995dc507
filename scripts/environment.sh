# Sourced by the other scripts: a virtual environment in .venv with mindllm installed, made once and renewed when pyproject.toml changes.

# The first of python3, python3.12, python3.11, python3.10 that is a supported version.
find_python() {
  local name
  for name in "${PYTHON:-python3}" python3.12 python3.11 python3.10; do
    if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "error: Python 3.10, 3.11 or 3.12 is needed (MindSpore has no wheel for others); set PYTHON=/path/to/python3.11" >&2
  return 2
}

# use_environment EXTRA: activates .venv with the package and one of its extras (all, test) installed.
use_environment() {
  local extra="${1:-}" python stamp wanted
  stamp=".venv/.installed${extra:+-$extra}"
  wanted=$(cksum setup.py pyproject.toml)
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    python=$(find_python) || return 2
    echo "== installing into .venv (the first time a few minutes: MindSpore is a download of 0.8 GB)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --upgrade pip
    .venv/bin/python -m pip install --quiet --editable ".${extra:+[$extra]}"
    echo "$wanted" > "$stamp"
  fi
  # shellcheck disable=SC1091
  source .venv/bin/activate
  export GLOG_v="${GLOG_v:-3}"  # MindSpore's own warnings about its deprecations
}
