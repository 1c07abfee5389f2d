#!/usr/bin/env bash
# ONNX Runtime GenAI with what its model builder imports.
set -euo pipefail
cd "$(dirname "$0")"
venv=.venvs/ortgenai
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q onnxruntime-genai==0.18.0 onnxruntime==1.31.1 \
  torch==2.13.0 transformers==5.23.0 onnx==1.23.2 onnx-ir==1.1.0 tqdm
