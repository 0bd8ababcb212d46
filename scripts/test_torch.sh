#!/usr/bin/env bash
# Builds and tests against another torch, in a copy of this tree with a venv of its own.
#
#   scripts/test_torch.sh 2.15.0
source "$(dirname "$0")/environment.sh"

version=${1:?usage: scripts/test_torch.sh VERSION}
work=$PWD/build-torch-$version
mkdir -p "$work/tree"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/tree"

venv=$work/venv/bin/python
[ -x "$venv" ] || python3 -m venv "$work/venv"
sed "s/^torch==.*/torch==$version/" requirements.txt >"$work/requirements.txt"
"$venv" -m pip install --quiet --disable-pip-version-check -r "$work/requirements.txt"
QKV_PYTHON=$venv exec "$work/tree/scripts/test.sh"
