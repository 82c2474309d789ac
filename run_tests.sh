#!/usr/bin/env bash
# Sets up .venv where need be, then lints, checks types and runs the tests. Arguments go to pytest.
#
#   ./run_tests.sh                          # everything; without a GPU two files at a time
#   ./run_tests.sh tests/test_policy.py -x  # what pytest takes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh

# check NAME COMMAND...: stops at the first that fails, and says which
check() {
  local name=$1
  shift
  say "$name"
  "$@" || fail "$name failed"
}

set_up
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}  # ranks are processes, threads fight
export TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1  # no test needs a hub: one that asks for it fails at once
check "ruff check" ruff check .
check "mypy speechrl" mypy speechrl
# a process that starts mostly waits: two at a time take two thirds of the time on two cores, more take more memory; not
# where two engines would share a GPU: vLLM measures what is free
[ $# -gt 0 ] || nvidia-smi -L > /dev/null 2>&1 || set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder
check "pytest $*" python -m pytest "$@"
say "all passed"
