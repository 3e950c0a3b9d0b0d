"""Write data/architecture_logits.npz: what transformers computes of tiny_architectures.CASES, in float32.

    python -m venv oracle && oracle/bin/pip install torch transformers gguf onnx onnxruntime pytest
    oracle/bin/python tests/python/make_architecture_logits.py

Not part of the tests, which read the file: torch takes gigabytes.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers
from tiny_architectures import CASES, KEPT_ROWS, LOGITS, Case, token_ids, transformers_weights


def logits(case: Case) -> np.ndarray:
    """float32 (len(KEPT_ROWS), vocab)."""
    kwargs = case.transformers_config()
    config = transformers.AutoConfig.for_model(kwargs.pop("model_type"), **kwargs)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = {name: torch.from_numpy(values) for name, values in transformers_weights(case).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = ["lm_head.weight"] if case.tied else []
    assert list(missing) == tied and not unexpected, (missing, unexpected)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.from_numpy(token_ids())[None]).logits[0, KEPT_ROWS].float().numpy()


if __name__ == "__main__":
    LOGITS.parent.mkdir(exist_ok=True)
    np.savez_compressed(LOGITS, **{name: logits(case) for name, case in CASES.items()})
    print(f"{LOGITS}: transformers {transformers.__version__}, torch {torch.__version__}")
