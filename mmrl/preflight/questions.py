"""All probes of a visual question answering job, in order. A gold is the reference answer of a row."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config import Config
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.prompts import chat, chat_texts, encode
from mmrl.policies.vlm.settings import TokenLimits, VisionLanguageModel
from mmrl.policies.vlm.templates import system_is_moved
from mmrl.preflight.alarms import CheckReport
from mmrl.preflight.boxes import probe_boxes
from mmrl.preflight.golds import GoldScores, probe_rewards
from mmrl.preflight.page import Row
from mmrl.preflight.prompts import select_evenly
from mmrl.preflight.readers import probe_lengths, probe_placeholders, probe_reading, probe_system
from mmrl.rollouts import Prompt
from mmrl.tasks.visual_qa.settings import RowReading, VisualQASettings
from mmrl.tasks.visual_qa.task import VisualQA

ROWS_TRIED = 24  # rows whose golds are scored as responses
ROWS_ON_PAGE = 8  # rows on the HTML page
REWARDS, ACCURACY = "task.rewards", "task.accuracy"


def probe_questions(
    config: Config,
    settings: VisualQASettings,
    task: VisualQA,
    prompts: Sequence[Prompt],
    processor: Processor | None,
    report: CheckReport,
) -> list[Row]:
    """Adds alarms about golds, boxes, lengths and the chat template to the report. Returns rows for the HTML page.

    prompts: a sample of the data. processor: the model's; None if it is not available, then prompts are not rendered.
    """
    limits, scores, rows = config.section("rollout"), dict[str, list[GoldScores]](), select_evenly(prompts, ROWS_TRIED)
    if not isinstance(limits, TokenLimits):
        report.skipped.append(("rewards", "the job learns from demonstrations, which are not scored"))
    else:
        limit = int(limits.max_response_length.extremes[1])
        if task.environment is None:
            scores = score_with_rewards(task, rows, limit, report)
            specs = [*settings.rewards, settings.accuracy]
            options = config.model.processor if isinstance(config.model, VisionLanguageModel) else {}
            report.add(probe_boxes(prompts, specs, options, REWARDS))
        else:
            report.skipped.append(("rewards", "golds of conversations with an environment are not scored"))
        if processor is None:
            report.skipped.append(("template", "prompts are not rendered: the model's processor is not available"))
        else:
            max_bad_share = settings.data.max_bad_share if isinstance(settings.data, RowReading) else 0.0
            probe_template(prompts, processor, limits.max_prompt_length, limit, report, max_bad_share)
    return [
        Row(
            prompt,
            rendered_text(processor, prompt),
            {name: score for name, row_scores in scores.items() for score in row_scores if score.prompt is prompt},
        )
        for prompt in rows[:ROWS_ON_PAGE]
    ]


def score_with_rewards(
    task: VisualQA, prompts: Sequence[Prompt], limit: int, report: CheckReport
) -> dict[str, list[GoldScores]]:
    """Scores gold answers with the verifier and the rewards, and adds alarms. Returns the scores of the rewards by
    name; none if scoring failed."""
    scores_by_key: dict[str, dict[str, list[GoldScores]]] = {}
    for key, rewards in ((ACCURACY, task.verifier), (REWARDS, task.rewards)):
        with report.catch_errors("rewards"):
            alarms, scores_by_key[key] = probe_rewards(prompts, rewards, key, limit, custom=True)
            report.add(alarms)
            if not_tried := [name for name in rewards.names if name not in scores_by_key[key]]:
                report.skipped.append(("rewards", f"golds are not scored with {', '.join(not_tried)} of {key}"))
    return scores_by_key.get(REWARDS, {})


def probe_template(
    prompts: Sequence[Prompt],
    processor: Processor,
    max_prompt: int,
    max_response: int,
    report: CheckReport,
    max_bad_share: float = 0.0,
) -> None:
    """Adds alarms about special tokens, system texts, readability and lengths of prompts.

    max_prompt, max_response: limits in tokens. max_bad_share: the share of unreadable rows that training leaves out.
    """
    tokenizer = processor.tokenizer
    special = [str(token) for token in tokenizer.special_tokens_map.values() if len(str(token)) > 2]
    special += [token for token in tokenizer.get_vocab() if token.startswith("<|") and token.endswith("|>")]
    report.add(probe_placeholders(prompts, list(dict.fromkeys(special))))
    report.add(probe_system(prompts, lambda prompt: system_is_moved(processor, chat(prompt))))
    report.add(probe_reading(prompts, lambda prompt: encode(processor, [prompt], max_prompt), max_bad_share))
    report.add(
        probe_lengths(prompts, lambda text: len(tokenizer(text, add_special_tokens=False).input_ids), max_response)
    )


def rendered_text(processor: Processor | None, prompt: Prompt) -> str:
    """Returns the prompt as the chat template renders it; its plain text if there is no processor or rendering
    fails."""
    if processor is None:
        return prompt.text
    try:
        return chat_texts(processor, [prompt])[0]
    except Exception:  # `probe_reading` has added an alarm about this prompt
        return prompt.text
