#!/usr/bin/env bash
# Builds the C++ kernels for aarch64 on an x86-64 machine and tests them in qemu's user emulation of a Neoverse N1:
# NEON, vectors of 128 bits. `make aarch64` calls it; arguments are pytest's.
#
# Needs Debian 12, root, and `apt-get install qemu-user-static mmdebstrap g++-aarch64-linux-gnu`, but no binfmt_misc.
# Costs 3 GB of downloads and 5 GB in build/aarch64, once (torch's wheel for aarch64 asks for CUDA's libraries), and
# 4 minutes of one core for the build; 210 of the tests took 5 minutes. `rm -r build/aarch64` starts anew, as another
# torch asks for.
#
#   PYTHON    the x86-64 Python that builds, with setuptools and ninja
#   TORCH     what pip installs as torch
#   COMPILER  aarch64-linux-gnu-g++, or another: "clang++-19 --target=aarch64-linux-gnu" is near to what Macs have
set -euo pipefail
cd "$(dirname "$0")/.."
place=$PWD/build/aarch64
compiler=${COMPILER:-aarch64-linux-gnu-g++}
root=$place/root site=$place/site cross=$place/cross
mkdir -p "$place"

# Debian's Python for aarch64, unpacked: none of its programs runs while it is made.
if [ ! -e "$root/done" ]; then
  rm -rf "$root"
  packages=python3.11,libpython3.11-dev,libstdc++6,libomp-dev
  mmdebstrap --variant=extract --architectures=arm64 --include="$packages" bookworm "$root"
  # qemu shows programs the host's own description of its processor, which libraries for aarch64 trip over
  mkdir -p "$root/proc"
  for ((cpu = 0; cpu < $(nproc --all); ++cpu)); do
    identification=$root/sys/devices/system/cpu/cpu$cpu/regs/identification
    mkdir -p "$identification"
    echo 0x00000000414fd0c1 > "$identification/midr_el1"
    printf '%s\n' "processor : $cpu" "CPU implementer : 0x41" "CPU architecture: 8" "CPU variant : 0x4" \
      "CPU part : 0xd0c" "CPU revision : 1" "Features : fp asimd atomics fphp asimdhp asimddp" ""
  done > "$root/proc/cpuinfo"
  touch "$root/done"
fi

# torch and what the tests import, in the wheels of aarch64, whose names allow a glibc of 2.17 to 2.28.
if [ ! -e "$site/done" ]; then
  rm -rf "$site"
  platforms=$(printf -- '--platform=manylinux_2_%s_aarch64 ' {17..28})
  "$PYTHON" -m pip install -q --no-compile --target "$site" $platforms --platform=manylinux2014_aarch64 \
    --python-version=3.11 --only-binary=:all: "$TORCH" "numpy<2.4" pytest hypothesis
  touch "$site/done"
fi

# The interpreter as one program, which sys.executable names, so that tests can start it.
cat > "$place/python" <<EOF
#!/bin/sh
exec qemu-aarch64-static -cpu neoverse-n1 -L "$root" -0 "$place/python" "$root/usr/bin/python3.11" "\$@"
EOF
chmod +x "$place/python"

# setup.py, run by the machine's own Python as if for the other: with its compiler, its names of files, and its torch.
mkdir -p "$cross/aarch64-linux-gnu"
cp -r "$root/usr/include/python3.11" "$cross/"
cp -r "$root/usr/include/aarch64-linux-gnu/python3.11" "$cross/aarch64-linux-gnu/"
cp "$root"/usr/lib/python3.11/_sysconfigdata__aarch64-linux-gnu.py "$cross/"
case $compiler in *clang*) compiler+=" -Wno-unused-command-line-argument $(printf -- '-L%s ' "$root"/usr/lib/llvm-*/lib)" ;; esac
CXX="$compiler -isystem $cross -isystem $cross/python3.11" TFM_KERNELS_CUDA_ARCHS= \
  PYTHONPATH=$cross:$site _PYTHON_HOST_PLATFORM=linux-aarch64 \
  _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__aarch64-linux-gnu "$PYTHON" setup.py -q build_ext --inplace

export PYTHONPATH=$site
"$place/python" -m tfm_kernels doctor
"$place/python" -m pytest -q "$@"
