# Making a Python environment that edged runs in: shared by tools/env and tools/install, which source this file.
# shellcheck shell=bash

TORCH=2.13.0
TORCH_AT_LEAST=2.6
TEGRA_RELEASE=${TEGRA_RELEASE:-/etc/nv_tegra_release} # there is one on a Jetson
CPU_TORCH=${CPU_TORCH:-} # not empty: on a Jetson too, the CPU build will do
CPU_INDEX=https://download.pytorch.org/whl/cpu
CONSTRAINTS="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/constraints.txt"
SKIP_CONSTRAINTS=${SKIP_CONSTRAINTS:-} # not empty: whatever versions pyproject.toml allows
# No interpreter below looks for modules in the current folder: whoever can write there would run code as this user.
export PYTHONSAFEPATH=1

fail() { echo "tools/${0##*/}: $*" >&2; exit 1; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

recent_enough() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }

# Prints "VERSION FOLDER" of the torch that interpreter $1 can import; fails when there is none.
torch_of() {
    "$1" -c 'import os, torch; print(torch.__version__, os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null
}

choose_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        recent_enough "$PYTHON" || fail "PYTHON=$PYTHON is $(version_of "$PYTHON" || echo "no interpreter"): edged needs Python 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if recent_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "edged needs Python 3.11 or newer, and python3 is $(version_of python3 || echo missing): install one and run PYTHON=/path/to/python $0"
}

# The sum of files $2... by interpreter $1, and whether there is a C compiler: what it compiles is optional.
digest_of() {
    command -v "${CC:-cc}" >/dev/null && printf 'cc '
    "$1" -c 'import hashlib, sys; print(hashlib.sha256(b"".join(open(f, "rb").read() for f in sys.argv[1:])).hexdigest())' "${@:2}"
}

# On a Jetson an environment without NVIDIA's torch would serve on the processor alone, and nobody would be told.
allow_cpu_torch() { # interpreter
    [ -e "$TEGRA_RELEASE" ] && [ -z "$CPU_TORCH" ] || return 0
    fail "this is a Jetson, and $1 (Python $(version_of "$1")) has no torch: install one with sm_87 for this JetPack and" \
        "Python (https://pypi.jetson-ai-lab.io; NVIDIA's sbsa wheels lack it), or name the interpreter that has it," \
        "PYTHON=/path/to/python. JetPack 7 has Python 3.12; JetPack 6, whose wheels are for Python 3.10, needs a container" \
        "(docs/operations.md). To serve on the processor: --cpu (tools/env: CPU_TORCH=1)"
}

# A new environment in folder $1 by interpreter $2. A torch that $2 can import already is seen from it.
make_venv() {
    local venv=$1 python=$2 options=(--clear) outside
    outside=$(torch_of "$python" || true)
    [ -n "$outside" ] || allow_cpu_torch "$python"
    echo "making $venv with $python ($(version_of "$python"))"
    [ -n "$outside" ] && options+=(--system-site-packages)
    "$python" -m venv "${options[@]}" "$venv" || fail "$python cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)"
    if [ -n "$outside" ] && ! torch_of "$venv/bin/python" >/dev/null; then
        # The interpreter is itself in a virtual environment, whose packages --system-site-packages does not reach.
        echo "${outside#* }" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/edged-torch.pth"
    fi
}

# What pip may install into environment $1 with torch $2: the tested versions. What the environment sees of the system,
# such as the numpy that a Jetson's torch was built for, stays as it is.
constraints_for() { # environment, torch's version
    local seen name
    echo "torch==$2"
    [ -z "$SKIP_CONSTRAINTS" ] || return 0
    freeze() { "$1/bin/python" -m pip --disable-pip-version-check freeze "${@:2}" 2>/dev/null | sed -E 's/[ =].*//' | LC_ALL=C sort; }
    seen=$(LC_ALL=C comm -23 <(freeze "$1") <(freeze "$1" --local))
    for name in $seen; do printf '^%s==\n' "${name//[-_.]/[-_.]}"; done | grep --invert-match --ignore-case --file=- "$CONSTRAINTS" || true
}

# Install edged into environment $1: pip's arguments follow, such as "--editable .". PIP_OPTIONS are given to every pip.
# A torch that is there is never replaced; else the pinned CPU build is installed.
install_edged() {
    local venv=$1 found constraints pip
    shift
    pip=("$venv/bin/python" -m pip install --disable-pip-version-check ${PIP_OPTIONS[@]+"${PIP_OPTIONS[@]}"})
    [ -t 1 ] || pip+=(--quiet)
    if ! found=$(torch_of "$venv/bin/python"); then
        allow_cpu_torch "$venv/bin/python"
        echo "installing torch $TORCH (CPU build)"
        # The CPU build is not on PyPI: it comes from a mirror that pip is configured for, else from PyTorch's own index.
        "${pip[@]}" "torch==$TORCH+cpu" 2>/dev/null || "${pip[@]}" "torch==$TORCH" --extra-index-url "$CPU_INDEX" || return 1
        found=$(torch_of "$venv/bin/python") || fail "torch $TORCH was installed but cannot be imported: $venv/bin/python -c 'import torch'"
    else
        echo "using torch ${found% *} from ${found#* }"
    fi
    "$venv/bin/python" -c 'import sys; least, have = ([int(part) for part in text.split("+")[0].split(".")[:2]] for text in sys.argv[1:]); sys.exit(have < least)' \
        "$TORCH_AT_LEAST" "${found%% *}" || fail "torch ${found%% *} (${found#* }) is too old: edged needs $TORCH_AT_LEAST or newer"
    constraints=$(mktemp)
    constraints_for "$venv" "${found%% *}" >"$constraints"
    "${pip[@]}" --constraint "$constraints" "$@" || { rm -f "$constraints"; return 1; }
    rm -f "$constraints"
}
