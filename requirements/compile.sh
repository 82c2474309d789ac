#!/usr/bin/env bash
# Remakes cpu.txt and gpu.txt from the *.in files. Pins that still fit are kept; flags go to uv.
#
#   requirements/compile.sh              # after a change of an *.in file
#   requirements/compile.sh --upgrade    # newest versions of everything
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh

uv=$(find_uv)
for name in cpu gpu; do
  say "requirements/$name.in -> requirements/$name.txt"
  "$uv" pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate "$@" \
    --override "requirements/$name.override" \
    "requirements/$name.in" --output-file "requirements/$name.txt" > /dev/null || fail "uv could not resolve requirements/$name.in"
  if grep -nE '://|^-' "requirements/$name.txt" >&2; then
    fail "requirements/$name.txt holds the address above: pin a version of a registry's package instead"
  fi
done
