"""Writes a quantised GGUF model as a folder in Hugging Face layout with bfloat16 weights: the same weights up to their
rounding, for comparisons of what quantisation gives. Needs transformers and torch.

    python scripts/unquantise.py MODEL.gguf FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("folder", type=Path, help="made if need be")
    options = parser.parse_args()
    source, name = str(options.model.parent), options.model.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # with it the library refuses to save what it has just made plain
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(options.folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
