#!/usr/bin/env bash
# Builds and tests against another torch, in a copy of this tree with a venv of its own.
#
#   scripts/test_torch.sh 2.15.0
source "$(dirname "$0")/environment.sh"

version=${1:?usage: scripts/test_torch.sh VERSION}
work=$PWD/build-torch-$version
scripts/setup.sh
mkdir -p "$work/tree"
find "$work/tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
  xargs -0 cp --parents -t "$work/tree"

venv=$work/venv/bin/python
[ -x "$venv" ] || "$PYTHON" -m venv "$work/venv"
sed "s/^torch==.*/torch==$version/" requirements.txt >"$work/requirements.txt"
"$venv" -m pip install --quiet --disable-pip-version-check -r "$work/requirements.txt"
QKV_PYTHON=$venv exec "$work/tree/scripts/test.sh"
