#!/bin/sh
# Install the command `crow` from this clone, for this user. Needs no root, no git and no C compiler.
#
#     sh packaging/install.sh          install or update
#     sh packaging/install.sh --remove remove it; sessions and settings stay
#
# uv brings a Python of its own if this machine has none from 3.11 on. Behind a proxy, set HTTPS_PROXY first.
set -eu

fail() {
    printf 'crow was not installed: %s\n' "$1" >&2
    exit 1
}

clone=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
[ -f "$clone/crow-cli/pyproject.toml" ] || fail "$clone is not a clone of crow; run the script where the clone has it."

if [ "${1:-}" = --remove ]; then
    command -v uv >/dev/null 2>&1 && exec uv tool uninstall crow-workspace
    printf 'crow was not removed: there is no uv here, which would have installed it.\n' >&2
    exit 1
fi

if ! command -v uv >/dev/null 2>&1; then
    if command -v pipx >/dev/null 2>&1; then
        pipx install uv || fail "pipx could not install uv."
    elif command -v python3 >/dev/null 2>&1; then
        python3 -m pip install --user uv ||
            fail "pip could not install uv. If your Python refuses a global pip, install pipx and start again."
    else
        fail "there is no uv, pipx or python3 here. Install one of them with your system's packages."
    fi
    PATH="$HOME/.local/bin:$PATH"
    command -v uv >/dev/null 2>&1 || fail "uv is installed but not on the PATH; add ~/.local/bin to it."
fi

uv tool install --reinstall "$clone" || fail "uv said why, above. Behind a proxy, set HTTPS_PROXY and start again."
programs=$(uv tool dir --bin)
"$programs/crow" --version
case ":$PATH:" in
*":$programs:"*) printf 'Next: crow demo, then crow setup.\n' ;;
*) printf 'Add %s to your PATH, then: crow demo, crow setup.\n' "$programs" ;;
esac
