#!/usr/bin/env bash
# llama.cpp as llama-cpp-python ships it: its own server, example and tools, compiled for this CPU.
# usage: setup_llamacpp.sh [JOBS]
set -euo pipefail
cd "$(dirname "$0")"
jobs=${1:-$(nproc)}
venv=$PWD/.venvs/llamacpp
sdist=llama_cpp_python-0.3.36

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.5.4 sentencepiece==0.2.1 protobuf==6.33.5
if [ ! -d "$venv/$sdist" ]; then
  "$venv/bin/python" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$venv" llama-cpp-python==0.3.36
  tar -xzf "$venv/$sdist.tar.gz" -C "$venv"
fi
# A native build by gcc 12 crashes in its AMX kernels: there, the same instructions without AMX.
arch=(-DGGML_NATIVE=ON)
version=$("${CXX:-c++}" -dumpfullversion 2>/dev/null || true)
if [ "${version%%.*}" = 12 ] && grep -qw amx_tile /proc/cpuinfo; then
  arch=(-DGGML_NATIVE=OFF -DGGML_AVX_VNNI=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON
    -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON)
fi
source=$venv/$sdist/vendor/llama.cpp
"$venv/bin/python" -m pip install -q "$source/gguf-py"
cmake -S "$source" -B "$venv/build" -DCMAKE_BUILD_TYPE=Release "${arch[@]}" -DGGML_OPENMP=ON \
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF \
  -DLLAMA_BUILD_APP=OFF >/dev/null
cmake --build "$venv/build" -j "$jobs" \
  --target llama-server llama-speculative-simple llama-quantize llama-bench
