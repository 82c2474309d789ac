# Sourced by run_train.sh, run_tests.sh and requirements/compile.sh, which first change to the repository root.
# Makes .venv fit the pinned requirements; does nothing when it fits already. Needs Python 3.11 or 3.12 and a registry
# that pip and uv can reach; not root, no GPU. A set-up that was killed half-way is repaired by the next run.

STAMP=.venv/.speechrl-stamp             # what a complete .venv was made from
INSTALLING=.venv/.speechrl-installing   # there while packages are being installed

say() { printf '== %s\n' "$*" >&2; }

fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# supported PYTHON: prints its path (of a virtual environment: the one behind it) if it runs and is 3.11 or 3.12
supported() {
  "$1" -c 'import sys; print(sys._base_executable); sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2> /dev/null
}

# prints a supported Python, or nothing
find_python() {
  local candidate path
  for candidate in python3 python3.11 python3.12; do
    if path=$(supported "$candidate"); then
      echo "$path"
      return
    fi
  done
}

# prints the path of uv: the one on PATH, or a private one that is installed here if need be
find_uv() {
  local private=.tools/uv python
  if command -v uv; then return; fi
  # its output counts: a file that was cut off at 0 bytes runs as an empty script, and succeeds
  if [[ $("$private/bin/uv" --version 2> /dev/null) != uv* ]]; then
    python=$(find_python)
    python=${python:-$(command -v python3 || true)}
    [ -n "$python" ] || fail "no uv and no python3 on PATH: install Python 3.11 or 3.12"
    say "installing uv into $private"
    rm -rf "$private"
    "$python" -m venv "$private" >&2 || fail "$python -m venv failed (on Debian and Ubuntu it needs the package python3-venv)"
    "$private/bin/python" -m pip install --quiet uv >&2 || fail "pip could not install uv"
  fi
  echo "$PWD/$private/bin/uv"
}

requirements_file() {
  if nvidia-smi -L > /dev/null 2>&1; then echo requirements/gpu.txt; else echo requirements/cpu.txt; fi
}

# stamp REQUIREMENTS: what .venv depends on; scripts in it hold its absolute path
stamp() {
  echo "$PWD $1 $(cat "$1" pyproject.toml | sha256sum | cut -d ' ' -f 1)"
}

# make_venv UV: a new .venv where there is none, or where it does not run or an installation into it was cut off
make_venv() {
  local python
  if [ ! -e "$INSTALLING" ] && supported .venv/bin/python > /dev/null; then return; fi
  python=$(find_python)
  if [ -e .venv ]; then say "replacing .venv, which is incomplete"; else say "making .venv"; fi
  rm -rf .venv
  "$1" venv --quiet --python "${python:-3.12}" .venv || fail "uv could not make .venv: speechrl needs Python 3.11 or 3.12"
}

# install UV REQUIREMENTS
install() {
  local started=$SECONDS
  make_venv "$1"
  rm -f "$STAMP"
  touch "$INSTALLING"
  say "installing $2 into .venv"
  "$1" pip sync --quiet --python .venv/bin/python "$2" || fail "uv could not install $2"
  # setuptools is pinned in the requirements, so the build needs nothing else
  "$1" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable . \
    || fail "uv could not install speechrl itself"
  stamp "$2" > "$STAMP"
  rm "$INSTALLING"
  say "set-up took $((SECONDS - started)) s"
}

fits() {
  [ ! -e "$INSTALLING" ] && [ "$(cat "$STAMP" 2> /dev/null)" = "$(stamp "$1")" ] && supported .venv/bin/python > /dev/null
}

# afterwards `python` and `speechrl` are those of .venv
set_up() {
  local requirements uv
  requirements=$(requirements_file)
  if fits "$requirements"; then
    say ".venv fits $requirements"
  else
    mkdir -p .tools
    (
      # of two scripts started together the second waits, then finds everything done
      flock --nonblock 9 || { say "waiting for another set-up in this folder"; flock 9; }
      if ! fits "$requirements"; then
        uv=$(find_uv)
        install "$uv" "$requirements"
      fi
    ) 9> .tools/setup.lock
  fi
  export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"
}
