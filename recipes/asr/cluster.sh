#!/usr/bin/env bash
# Several machines: a Ray head, workers, and a recipe as a Ray job. For nodes of 8 GPUs each that see one file system
# (this folder with its .venv, corpora and runs under the same paths) and can reach each other's ports.
#
#   recipes/asr/cluster.sh head                                         # on the first node; prints the next commands
#   recipes/asr/cluster.sh worker HEAD                                  # on every other node; HEAD is the first's address
#   GPUS=16 recipes/asr/cluster.sh submit recipes/asr/wenetspeech.sh    # on the head: GPUS of all nodes together
#
# Further words of `submit` are flags of `speechrl train`; variables of the recipe go before it, as GPUS does. End a
# node's part with `ray stop` there, which ends every Ray process of that machine.
# Ray asks for a token: `ray get-auth-token --generate` makes one in the home folder, and every node needs the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PORT=${PORT:-6379}              # of the cluster
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

if [ -z "${VIRTUAL_ENV:-}" ] && [ -d .venv ]; then export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"; fi

case "${1:-}" in
  head)
    ray start --head --port "$PORT" --dashboard-host 0.0.0.0 --dashboard-port "$DASHBOARD_PORT" \
      --num-gpus "$GPUS_PER_NODE"
    ;;
  worker)
    ray start --address "${2:?worker HEAD: the address of the first node}:$PORT" --num-gpus "$GPUS_PER_NODE"
    ;;
  submit)
    recipe=${2:?submit RECIPE [flags]}
    shift 2
    # the job runs on the head; what the recipe reads from the environment is handed on
    handed=()
    for name in MODEL CORPUS DATA RUN GPUS STEPS SUBSET RANKED LANGUAGES SHARES SUBSETS TRAIN DEV TEST WORDS NOISE \
      NOISE_DEV ROOMS DISTRACTORS; do
      if [ -n "${!name:-}" ]; then handed+=("$name=${!name}"); fi
    done
    ray job submit --address "http://127.0.0.1:$DASHBOARD_PORT" -- \
      env --chdir "$PWD" "PATH=$PATH" "${handed[@]}" ADDRESS=auto bash "$recipe" "$@"
    ;;
  *)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' recipes/asr/cluster.sh
    [ -z "${1:-}" ] || exit 2
    ;;
esac
