#!/usr/bin/env bash
# Builds the C++ kernels for a Mac of Apple silicon on a Linux machine: compiled by clang with Apple's headers, linked
# against the libraries of torch's wheel for macOS, in which everything that they lack must be found. Nothing is run.
# `make macos` calls it; it needs the wheels of zig (100 MB) and of torch for macOS (110 MB), and takes two minutes of two
# cores, in build/macos.
#
#   PYTHON  the Python that builds, with pip, setuptools and ninja
#   TORCH   what pip installs as torch
set -euo pipefail
cd "$(dirname "$0")/.."
place=$PWD/build/macos
site=$place/site zig=$place/zig
mkdir -p "$place"

if [ ! -e "$zig/done" ]; then
  rm -rf "$zig"
  "$PYTHON" -m pip install -q --no-compile --target "$zig" ziglang
  touch "$zig/done"
fi
if [ ! -e "$site/done" ]; then
  rm -rf "$site"
  "$PYTHON" -m pip install -q --no-compile --no-deps --target "$site" --platform=macosx_14_0_arm64 \
    --python-version="$("$PYTHON" -c 'import platform; print(platform.python_version())')" --only-binary=:all: "$TORCH"
  touch "$site/done"
fi

# setup.py as on a Mac, with nothing put where this machine's own extensions lie
compiler="$PYTHON -m ziglang c++ -target aarch64-macos.14.0"
export PYTHONPATH=$site:$zig
rm -rf "$place/lib"
CXX=$compiler TFM_KERNELS_CUDA_ARCHS='' _PYTHON_HOST_PLATFORM=macosx-14.0-arm64 \
  "$PYTHON" setup.py -q build_ext --build-lib "$place/lib"

# Linked once more with no promise that symbols come later, of which only Python's may be missing then.
objects=$("$PYTHON" - "$compiler" <<'PY'
import importlib.metadata, pathlib, sys, zlib
key = f"{importlib.metadata.version('torch')}-{sys.implementation.cache_tag}-{zlib.crc32(sys.argv[1].encode()):08x}"
print(*pathlib.Path("build", f"torch-{key}").glob("csrc/**/*.o"))
PY
)
lacking=$($compiler -shared $objects "-L$site/torch/lib" -ltorch -ltorch_cpu -ltorch_python -lc10 -lomp \
  -o "$place/whole.so" 2>&1 | grep undefined || true)
python_alone=$(grep -c '_Py' <<< "$lacking" || true)
others=$(grep -v '_Py' <<< "$lacking" || true)
if [ -n "$others" ] || [ "$python_alone" -lt 10 ]; then
  printf 'not in torch for macOS:\n%s\n' "$others"
  exit 1
fi
echo "macOS: $(wc -w <<< "$objects") objects linked; all symbols are torch's, but for $python_alone of Python's"
