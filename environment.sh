# Sourced by demo.sh and test.sh: makes $PYTHON an interpreter with what the requirements file $1 lists.
#
# By default that is ./.venv, made with python3 and the package index. To use an interpreter of your own,
# with whatever it has installed, export PYTHON first: nothing is installed then.

environment() {
    if [ -n "${PYTHON:-}" ]; then
        echo "environment: $PYTHON (from \$PYTHON, used as it is)"
        return
    fi
    local wanted stamp=.venv/.installed-$1
    wanted=$(cat requirements*.txt | cksum)
    PYTHON=.venv/bin/python
    if [ -x $PYTHON ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        echo "environment: .venv, complete"
        return
    fi
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: python3 is $(python3 --version 2>&1 || true); expected Python 3.11 or newer" >&2
        exit 2
    fi
    echo "environment: installing $1 into .venv (a few minutes the first time) ..."
    $PYTHON -m pip --version > /dev/null 2>&1 || python3 -m venv --clear .venv || {
        echo "error: python3 -m venv failed (on Debian: apt install python3-venv)" >&2
        exit 2
    }
    $PYTHON -m pip install --quiet --disable-pip-version-check -r "$1" || {
        echo "error: pip could not install $1 (its message is above)" >&2
        exit 2
    }
    echo "$wanted" > "$stamp"
}
