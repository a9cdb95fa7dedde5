#!/usr/bin/env bash
# Make the virtual environment of the TRL baseline.
#
#   setup.sh [VENV]    VENV: .venv-trl at the repository root by default
#
# PYTHON names the interpreter (default: python3.11). An environment that was made from the same requirements.txt is
# left as it is; any other one is made anew.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements=$here/requirements.txt
venv=${1:-$(dirname "$(dirname "$here")")/.venv-trl}
stamp=$venv/.made-from

wanted=$(sha256sum <"$requirements")
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
    echo "$venv is not a virtual environment: give another path" >&2
    exit 1
fi
echo "making $venv, which takes minutes" >&2
"${PYTHON:-python3.11}" -m venv --clear "$venv"
# The list is complete. Without --no-deps, pip would add packages that the CPU does not need: see its head.
"$venv/bin/python" -m pip install -qq --no-deps --requirement "$requirements"
printf '%s\n' "$wanted" >"$stamp"
