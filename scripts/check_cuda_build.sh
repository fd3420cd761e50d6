#!/usr/bin/env bash
# Build the ops for CUDA against torch's wheels from PyPI, as a user would, and load them. This needs no GPU and no CUDA
# toolkit, but 10 GB of disk and a few minutes.
#
#   bash scripts/check_cuda_build.sh [TORCH_VERSION [VENV]]    default: the newest torch, in a temporary folder
#
# VENV is created if it does not exist, and kept. ZB_PYTHON is the interpreter that creates it (default: python3).
# Prints one line per check. The exit status is the number of checks that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch="torch${1:+==$1}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
venv="${2:-$work/venv}"
python="$venv/bin/python"
# pip's configuration may prefer a torch without CUDA, and an installed toolkit may have what the wheels lack.
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 CUDA_HOME=/nonexistent
unset PIP_FIND_LINKS PYTHONPATH CUDA_PATH
num_failed=0

# Run a command; print its last line, its seconds and, if it fails, its end.
check() {
    local name="$1" start="$SECONDS"
    shift
    if "$@" >"$work/log" 2>&1; then
        printf 'ok      %s (%d s): %s\n' "$name" "$((SECONDS - start))" "$(tail -n 1 "$work/log")"
    else
        num_failed=$((num_failed + 1))
        printf 'FAILED  %s (%d s)\n' "$name" "$((SECONDS - start))"
        tail -n 30 "$work/log" | sed 's/^/        /'
        return 1
    fi
}

make_environment() {
    [[ -x "$python" ]] || "${ZB_PYTHON:-python3}" -m venv "$venv"
    "$python" -m pip install --quiet "$torch" numpy setuptools pybind11 pytest && "$python" -c '
import platform, sys, torch
size = sys.argv[1]
print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {size} MB installed")
sys.exit(torch.version.cuda is None)' "$(du -sm "$venv" | cut -f 1)"
}

# Install the packages that setup.py names. In an environment that has them, it names none.
install_headers() {
    local advice
    advice="$(ZB_BUILD=cuda "$python" setup.py --quiet --version 2>&1 | sed -n 's/.*`pip install \([^`]*\)`.*/\1/p')"
    [[ -z "$advice" ]] || xargs "$python" -m pip install --quiet <<<"$advice" || return 1
    echo "${advice:-nothing to install}"
}

# Build into a folder, with what ZB_BUILD says.
build() {
    ZB_BUILD="$1" "$python" setup.py --quiet build_ext --build-lib "$2" --build-temp "$2/objects" &&
        find "$2/megatron" -name '_ops*.so' -printf '%s bytes\n' | grep .
}

# Load what was built, find the kernels of the named devices, and compare those of the CPU with float64.
run_ops() {
    local folder="$1"
    shift
    (cd "$work" && LD_BIND_NOW=1 "$python" - "$folder"/megatron/zero_bubble/_ops*.so "$@") <<'EOF'
import sys
import torch

path, *devices = sys.argv[1:]
torch.ops.load_library(path)
for op in ("wgrad_accumulate", "wgrad_accumulate_many"):
    for device in ("CPU", "CUDA"):
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_bubble::{op}", device)
        assert has_kernel == (device in devices), f"{op} has {'a' if has_kernel else 'no'} kernel for {device}"
torch.manual_seed(1)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x, grad_output = (torch.randn(700, size).to(dtype) for size in (33, 17))
    grad, exact = torch.ones(17, 33), 1 + grad_output.double().t() @ x.double()
    torch.ops.zero_bubble.wgrad_accumulate(x, grad_output, grad)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-4)
print(f"kernels for {' and '.join(devices)}; those of the CPU equal float64")
EOF
}

try_build() { # NAME ZB_BUILD DEVICE ...
    local name="$1" wanted="$2"
    shift 2
    check "build $name" build "$wanted" "$work/$wanted" && check "load $name" run_ops "$work/$wanted" "$@"
}

check "install $torch" make_environment || exit "$num_failed"
if ! ZB_BUILD=cuda "$python" setup.py --quiet --version >/dev/null 2>&1; then
    try_build "with ZB_BUILD=auto, before CUDA's headers are installed" auto CPU
fi
check "install CUDA's headers" install_headers
try_build "with ZB_BUILD=cuda" cuda CPU CUDA
check "tests/engine/kernels/test_build.py" "$python" -m pytest --quiet --noconftest -c /dev/null --rootdir . -p no:cacheprovider \
    tests/engine/kernels/test_build.py
exit "$num_failed"
