#!/usr/bin/env bash
# Proves every YAML below runs/ in which a change differs from the branch it goes to: prove_changed.sh BRANCH
# Data that is not on the machine of the CI may stay open; a cluster proves it where the files are.
set -euo pipefail

if [ "$(git rev-parse --is-shallow-repository)" = true ]; then git fetch --quiet --unshallow origin; fi
git fetch --quiet origin "$1"
list=$(mktemp)
trap 'rm -f "$list"' EXIT
git diff --name-only --diff-filter=d -z FETCH_HEAD...HEAD -- 'runs/*.yaml' > "$list"
mapfile -d '' -t changed < "$list"
if [ ${#changed[@]} -eq 0 ]; then
    echo "no YAML below runs/ has changed"
    exit 0
fi
mindllm prove "${changed[@]}" --allow data --output proof --junit proofs.xml --sarif proofs.sarif
