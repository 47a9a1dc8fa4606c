#!/bin/sh
# An Arm Linux in a folder for `make test-arm`: Debian's Python 3.11, and packages for it from PyPI.
# Takes the folder, and a Python with pip. Needs Debian's apt-get and keyring, and no rights of root.
set -eu
python=$2 system=$1/system packages=$1/packages apt=$1/apt
keys=/usr/share/keyrings/debian-archive-keyring.gpg

command -v qemu-aarch64-static >/dev/null || {
    echo "make test-arm: qemu-aarch64-static is not in PATH: apt-get install qemu-user-static" >&2
    exit 1
}
[ -e $keys ] && command -v apt-get dpkg >/dev/null || {
    echo "make test-arm: needs apt-get, dpkg and $keys: Debian, or debian-archive-keyring" >&2
    exit 1
}

mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$system/proc"
apt=$(cd "$apt" && pwd)
: >"$apt/status"
echo "deb [signed-by=$keys] http://deb.debian.org/debian bookworm main" >"$apt/sources.list"
get() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$apt" \
        -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
        -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- \
        -o APT::Install-Recommends=false -o APT::Sandbox::User=root "$@"
}
get update
get --download-only --yes install python3.11-minimal libpython3.11-stdlib libstdc++6
for package in "$apt"/cache/archives/*.deb; do dpkg -x "$package" "$system"; done
# torch reads this, and fails where it is not Arm's; the emulator shows that of the machine.
for i in 0 1; do
    printf 'processor\t: %d\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n' "$i"
    printf 'CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n'
done >"$system/proc/cpuinfo"

platforms=$(seq -f '--platform manylinux_2_%.0f_aarch64' 17 36)
# torch for the CPU from its own index; PyPI's brings CUDA, 4 GB of it.
# shellcheck disable=SC2086
"$python" -m pip install --quiet --retries 1 --target "$packages" --only-binary=:all: --no-compile \
    --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
    $platforms --platform manylinux2014_aarch64 \
    --extra-index-url https://download.pytorch.org/whl/cpu \
    torch==2.13.0 "llvmlite==$("$python" -c 'import llvmlite; print(llvmlite.__version__)')" numpy transformers safetensors rich typer pytest pytest-timeout hypothesis
