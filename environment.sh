# Sourced by demo.sh and test.sh: makes $PYTHON an interpreter with the requirements in file $1.
#
# By default .venv, made by uv where that is installed, else by python3 -m venv and pip. An exported $PYTHON is
# used unchanged: nothing is installed.

environment() {
    if [ -n "${PYTHON:-}" ]; then
        echo "environment: $PYTHON (from \$PYTHON, used unchanged)"
        return
    fi
    local wanted stamp=.venv/.installed-$1
    wanted=$(cat requirements*.txt | cksum)
    PYTHON=.venv/bin/python
    if [ -x $PYTHON ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        echo "environment: .venv, complete"
        return
    fi
    echo "environment: installing $1 into .venv (a few minutes the first time) ..."
    install_with_uv "$1" || install_with_pip "$1"
    echo "$wanted" > "$stamp"
}

install_with_uv() {
    command -v uv > /dev/null || return 1
    [ -x $PYTHON ] || uv venv --quiet --python '>=3.11' .venv || return 1
    # uv ignores pip's settings: pass on those that choose a build of torch, and compare all indexes as pip does.
    UV_EXTRA_INDEX_URL=${UV_EXTRA_INDEX_URL:-${PIP_EXTRA_INDEX_URL:-}} \
        UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} UV_INDEX_STRATEGY=unsafe-best-match \
        uv pip install --quiet --python $PYTHON -r "$1" || {
        echo "environment: uv could not install $1 (its message is above); trying pip" >&2
        return 1
    }
}

install_with_pip() {
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: python3 is $(python3 --version 2>&1 || true); expected Python 3.11 or newer" >&2
        exit 2
    fi
    $PYTHON -m pip --version > /dev/null 2>&1 || python3 -m venv --clear .venv || {
        echo "error: python3 -m venv failed (on Debian: apt install python3-venv)" >&2
        exit 2
    }
    $PYTHON -m pip install --quiet --disable-pip-version-check -r "$1" || {
        echo "error: pip could not install $1 (its message is above)" >&2
        exit 2
    }
}
