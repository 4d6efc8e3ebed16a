#!/bin/sh
# Installs what the build and the adapters need, and nothing that is there already:
#   1. system packages (libraries by pkg-config, protobuf-c's compiler, a C++ compiler and Python's
#      headers for torch.compile), with apt as root or through sudo, else the command is printed;
#   2. a virtual environment with Python >= 3.11, packages pinned by constraints.txt;
#   3. a .pth file that makes adapters/python and adapters/optimum importable from the source tree
#      (optimum is a namespace package, so a path entry is all that `optimum.gradd` needs).
# Usage: tools/setup.sh [VENV]. Safe to repeat: a second run finds the stamp and does nothing.
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp=$venv/gradd-setup.mk
apt_packages="libzmq3-dev libmsgpack-dev libmicrohttpd-dev libprotobuf-c-dev protobuf-c-compiler \
pkg-config g++ python3-dev python3-venv"

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Prints the first interpreter that is new enough. PYTHON=... overrides.
find_python() {
    for p in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if command -v "$p" >/dev/null 2>&1 &&
           "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$p"
            return 0
        fi
    done
    return 1
}

# Names what is missing, one word each; empty when the machine is ready.
missing_system() {
    for tool in pkg-config protoc-c g++ gcc; do
        command -v "$tool" >/dev/null 2>&1 || printf '%s ' "$tool"
    done
    if command -v pkg-config >/dev/null 2>&1; then
        for lib in libzmq libprotobuf-c libmicrohttpd; do
            pkg-config --exists "$lib" || printf '%s ' "$lib"
        done
        pkg-config --exists msgpack-c || pkg-config --exists msgpack || printf 'msgpack '
    fi
    if python=$(find_python); then
        "$python" -c 'import ensurepip, venv' 2>/dev/null || printf 'python3-venv '
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
            printf 'python3-dev '
    else
        printf 'python>=3.11 '
    fi
}

install_system() {
    missing=$(missing_system)
    [ -n "$missing" ] || return 0
    say "missing on this system: $missing"
    command -v apt-get >/dev/null 2>&1 ||
        die "no apt-get here: install the packages that provide these, then run make setup again"
    if [ "$(id -u)" = 0 ]; then
        as_root=
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        die "not root; run this once, then make setup again:
    sudo apt-get install -y $apt_packages"
    fi
    say "apt-get install $apt_packages"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086  # both are lists of words
    $as_root apt-get install -y --no-install-recommends $apt_packages >/dev/null 2>&1 ||
        { $as_root apt-get update -q &&
          $as_root apt-get install -y --no-install-recommends $apt_packages; } ||
        die "apt-get failed"
    missing=$(missing_system)
    [ -z "$missing" ] || die "still missing after installation: $missing"
}

# All names in the requirement files are installed with the pinned versions?
python_ready() {
    "$venv/bin/python" - constraints.txt requirements.txt requirements-dev.txt 2>/dev/null <<'EOF'
import importlib.metadata as metadata, platform, re, sys
pins = dict(re.findall(r"^([\w.-]+)==(\S+)", open(sys.argv[1]).read(), re.M))
for path in sys.argv[2:]:
    for line in open(path):
        name, _, marker = line.split("#")[0].strip().partition(";")
        if name and (not marker or platform.machine() == "x86_64"):
            found = metadata.version(name).split("+")[0]
            assert found == pins[name], (name, found)
EOF
}

install_python() {
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python) || die "no Python >= 3.11"
        say "creating $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    if ! python_ready; then
        pip="$venv/bin/python -m pip --disable-pip-version-check install -q --progress-bar off"
        say "installing Python packages into $venv (torch first; this takes a few minutes once)"
        $pip "$(grep '^torch==' constraints.txt)"
        $pip -c constraints.txt -r requirements.txt -r requirements-dev.txt
    fi
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    # The last line is run at every start: the import hook that serves old names.
    printf '%s\n' "$PWD/adapters/python" "$PWD/adapters/optimum" \
        "import gradd_aliases" >"$site/gradd-source.pth"
}

# Packages may be shared, but the .pth file makes one tree's adapters importable, for all users.
if grep -qs "^# set up in " "$stamp" && ! grep -qF "set up in $PWD:" "$stamp"; then
    case $(readlink -f "$venv") in
    "$PWD"/*) ;; # the tree was copied or moved, its environment with it
    *) die "$venv belongs to another tree ($(cat "$stamp")): use an environment of your own" ;;
    esac
fi
# The stamp is an (otherwise empty) makefile, so make can include it and run setup when it is missing.
fingerprint=$(cat constraints.txt requirements.txt requirements-dev.txt tools/setup.sh | cksum)
line="# set up in $PWD: $fingerprint"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$line" ] && [ -z "$(missing_system)" ]; then
    touch "$stamp"
    exit 0
fi
install_system
install_python
printf '%s\n' "$line" >"$stamp"
say "ready"
