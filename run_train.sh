#!/usr/bin/env bash
# Sets up .venv where need be, then runs one recipe.
#
#   ./run_train.sh                                    # recipes/asr/quickstart.sh
#   ./run_train.sh recipes/asr/NAME.sh [flags]        # another recipe; flags go to it
#   ./run_train.sh [flags]                            # flags for the quickstart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh

recipe=recipes/asr/quickstart.sh
case "${1:-}" in
  -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' run_train.sh; exit ;;
  "" | -*) ;;
  *) recipe=$1; shift ;;
esac
if [ ! -f "$recipe" ]; then
  fail "no recipe $recipe; there are:"$'\n'"$(find recipes -name '*.sh' | sort | sed 's/^/  /')"
fi

set_up
say "running $recipe $*"
exec bash "$recipe" "$@"
