#!/bin/sh
# Make .venv and install exactly what a lock file names.
#
#     scripts/setup.sh runtime|dev [FOLDER]     FOLDER: the environment, by default .venv
#
# uv, itself installed by pip from a lock file, does it in a few seconds. Where it cannot (a package index that
# only pip's own configuration knows, say), pip does it.
set -eu
cd "$(dirname "$0")/.."
lock=requirements/$1.lock
venv=${2:-.venv}
python=$venv/bin/python

is_usable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null
}

if ! [ -x "$python" ] || ! is_usable "$python"; then
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if is_usable "$candidate"; then
            found=$candidate
            break
        fi
    done
    if [ -z "${found:-}" ]; then
        echo "setup: no Python 3.11 to 3.14 on the PATH (PYTHON=... names one)" >&2
        exit 1
    fi
    rm -rf "$venv"
    if ! "$found" -m venv "$venv"; then
        rm -rf "$venv"
        echo "setup: $found cannot make environments; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
if "$python" -m pip install -q --require-hashes -r requirements/installer.lock &&
    UV_PYTHON_DOWNLOADS=never "$venv/bin/uv" pip install -q --compile-bytecode --python "$python" --require-hashes -r "$lock"; then
    :
else
    echo "setup: uv did not manage, pip goes on" >&2
    "$python" -m pip install -q --require-hashes -r "$lock"
fi
# Needs no network: hatchling is in the lock file.
"$python" -m pip install -q --no-deps --no-build-isolation -e .
touch "$venv/.$1"
