#!/usr/bin/env bash
# Builds the site into site/, without a network; a dead link, or a page that nav in mkdocs.yml leaves out, fails.
# Usage: bash scripts/docs.sh [arguments of mkdocs build]; while writing: source .venv/bin/activate && mkdocs serve
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
if [ -f .venv/.installed-test ]; then
  use_environment test  # has what docs has
else
  use_environment docs
fi
export NO_MKDOCS_2_WARNING=1  # Material's notice of the end of its maintenance
python -m mkdocs build --strict "$@"
