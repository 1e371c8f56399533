"""What transformers makes of every case: the tensors it saves, the config it writes, and its logits in float64.

`python -m tests.huggingface.oracle`, where transformers is installed, writes the two files that the tests read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from meshwright.catalog.huggingface.header import read_header
from tests.huggingface.cases import TOKENS, configs
from tests.huggingface.folders import write_model

HERE = Path(__file__).parent
TOLD, LOGITS = HERE / "oracle.json", HERE / "oracle_logits.npz"


def saved(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The config that transformers writes of a model of this one, and the tensors of the file beside it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest))
    model.save_pretrained(folder)
    header = read_header(folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text()), {name: header[name].shape for name in sorted(header)}


def logits_of(folder: Path) -> npt.NDArray[np.float64]:
    """(tokens, vocab) of the fixed tokens, by the model in `folder`, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0]
    return np.asarray(found.double().numpy(), dtype=np.float64)


def main() -> None:
    told, logits = {}, {}
    with tempfile.TemporaryDirectory() as place:
        for name, config in configs().items():
            written, shapes = saved(config, Path(place) / name)
            folder = write_model(Path(place) / f"{name}-filled", config, shapes)
            logits[name] = logits_of(folder).astype(np.float32)
            told[name] = {"config": written, "tensors": shapes}
    TOLD.write_text(json.dumps(told, indent=None, separators=(",", ":")) + "\n")
    np.savez_compressed(LOGITS, **logits)


if __name__ == "__main__":
    main()
