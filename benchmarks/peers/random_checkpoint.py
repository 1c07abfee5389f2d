"""Write a checkpoint of random weights in the shape of Qwen3.5-0.8B, for speed alone.

    random_checkpoint.py OUT [--tokenizer FOLDER]

Its text is noise; its passes cost what the published model's cost. The vision tower, which no
runtime measured here opens, has one layer. The tokenizer is another model's: ids beyond it are
never written as text.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

TOKENIZER = Path(__file__).parents[2] / "engines" / "codelet" / "checkpoint" / "target"
TEXT = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
}


def main() -> None:
    """Draw the weights in bf16 and save them with a tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a checkpoint's folder")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(given.out)
    for file in given.tokenizer.glob("*token*.json"):
        shutil.copy(file, given.out)


if __name__ == "__main__":
    main()
