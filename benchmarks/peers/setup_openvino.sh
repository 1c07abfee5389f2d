#!/usr/bin/env bash
# OpenVINO GenAI, and beside it the converter, which needs an older transformers.
set -euo pipefail
cd "$(dirname "$0")"
for name in openvino openvino-convert; do
  [ -x ".venvs/$name/bin/python" ] || "${PYTHON:-python3}" -m venv ".venvs/$name"
done
.venvs/openvino/bin/python -m pip install -q openvino-genai==2026.4.1.0
.venvs/openvino-convert/bin/python -m pip install -q torch==2.13.0 optimum-intel==2.2.0 \
  nncf==3.4.0 openvino==2026.4.1 openvino-tokenizers==2026.4.1.0
# optimum-intel brings a torchvision for CUDA, with which transformers does not even import.
.venvs/openvino-convert/bin/python -m pip uninstall -q -y torchvision
