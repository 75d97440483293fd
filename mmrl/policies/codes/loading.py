"""Models that write pictures as codes, from folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoTokenizer

from mmrl.controls import constant
from mmrl.errors import UserError
from mmrl.policies import codebook
from mmrl.policies.codes.policy import CodePolicy, CodeScorer
from mmrl.policies.codes.settings import CodeDrawing, CodeEvaluation, CodeLimits, CodeModel, CodeSampling
from mmrl.policies.vlm.loading import adapt, described, recompute_activations, whole
from mmrl.policies.vlm.policy import transformers_model

if TYPE_CHECKING:
    from mmrl.config import Config


def load(path: str, settings: CodeModel, config: Config) -> CodePolicy:
    """The policy of a job. Raises UserError without a causal language model at `path`, or a codebook beside it."""
    limits, drawing = config.rollout, config.section("drawing")
    assert isinstance(limits, CodeLimits) and isinstance(drawing, CodeDrawing)
    assert isinstance(config.evaluation, CodeEvaluation)
    codes = codebook.read(path)
    if codes is None:
        raise UserError(
            f"model.path={path} has no {codebook.NAME}.safetensors, which says what pictures its tokens are; see "
            "mmrl/policies/codebook.py"
        )
    known = described(path)
    if type(known) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model.path={path} is a {known.model_type} model, which does not write token after token")
    model = whole(AutoModelForCausalLM, path, settings.dtype, settings.attention)
    model = adapt(model, path, freeze=(), lora=settings.lora)
    if settings.activation_checkpointing:
        recompute_activations(model)
    codes.outside(transformers_model(model).get_output_embeddings().weight.shape[0])
    return CodePolicy(
        CodeScorer(model, codes.first, len(codes.patches)),
        AutoTokenizer.from_pretrained(path),
        codes,
        drawing,
        max_prompt_length=limits.max_prompt_length,
        temperature=limits.temperature if isinstance(limits, CodeSampling) else constant(1.0),
        evaluation_temperature=config.evaluation.temperature,
    )
