#!/usr/bin/env bash
# Shows the library at work: worked examples, a language model trained in C++ and exported, speed.
#
#   scripts/demo.sh [--text FILE..] [--minutes N] [--output DIR]
source "$(dirname "$0")/environment.sh"

scripts/setup.sh
say "Building"
scripts/build.sh examples
python_in_caller examples/demo.py "$@"
