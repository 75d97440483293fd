"""All probes of a job of visual questions, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config import Config
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.prompts import chat, chat_texts, encode
from mmrl.policies.vlm.settings import TokenLimits, VisionLanguageModel
from mmrl.policies.vlm.templates import system_is_moved
from mmrl.preflight.alarms import Findings
from mmrl.preflight.boxes import probe_boxes
from mmrl.preflight.golds import Marks, probe_rewards
from mmrl.preflight.page import Row
from mmrl.preflight.prompts import spread
from mmrl.preflight.readers import probe_lengths, probe_placeholders, probe_reading, probe_system
from mmrl.rollouts import Prompt
from mmrl.tasks.visual_qa.settings import RowReading, VisualQASettings
from mmrl.tasks.visual_qa.task import VisualQA

TRIED = 24  # rows whose golds are tried
SHOWN = 8  # prompts on a page
REWARDS, ACCURACY = "task.rewards", "task.accuracy"


def probe_questions(
    config: Config,
    settings: VisualQASettings,
    task: VisualQA,
    prompts: Sequence[Prompt],
    processor: Processor | None,
    findings: Findings,
) -> list[Row]:
    """Adds what is wrong with golds, boxes, lengths and templates; returns rows for a page. prompts: those that were
    read; processor: of the model, None where it is not at hand."""
    lengths, marks, rows = config.section("rollout"), dict[str, list[Marks]](), spread(prompts, TRIED)
    if not isinstance(lengths, TokenLimits):
        findings.unread.append(("rewards", "demonstrations are learned from, and not scored"))
    else:
        limit = int(lengths.max_response_length.extremes[1])
        if task.environment is None:
            marks = _golds(task, rows, limit, findings)
            specs = [*settings.rewards, settings.accuracy]
            options = config.model.processor if isinstance(config.model, VisionLanguageModel) else {}
            findings.add(probe_boxes(prompts, specs, options, REWARDS))
        else:
            findings.unread.append(("rewards", "golds of conversations with an environment are not tried"))
        if processor is None:
            findings.unread.append(("template", "prompts are not rendered: the model's processor is not at hand"))
        else:
            allowed = settings.data.max_bad_share if isinstance(settings.data, RowReading) else 0.0
            probe_template(prompts, processor, lengths.max_prompt_length, limit, findings, allowed)
    return [
        Row(
            prompt,
            rendered(processor, prompt),
            {name: mark for name, all_marks in marks.items() for mark in all_marks if mark.prompt is prompt},
        )
        for prompt in rows[:SHOWN]
    ]


def _golds(task: VisualQA, prompts: Sequence[Prompt], limit: int, findings: Findings) -> dict[str, list[Marks]]:
    """Tries golds with verifier and rewards; returns the marks of the rewards."""
    marks: dict[str, list[Marks]] = {}
    for key, rewards in ((ACCURACY, task.verifier), (REWARDS, task.rewards)):
        with findings.guarded("rewards"):
            alarms, marks = probe_rewards(prompts, rewards, key, limit, custom=True)
            findings.add(alarms)
            if untried := [name for name in rewards.names if name not in marks]:
                findings.unread.append(("rewards", f"golds are not tried with {', '.join(untried)} of {key}"))
    return marks


def probe_template(
    prompts: Sequence[Prompt],
    processor: Processor,
    max_prompt: int,
    max_response: int,
    findings: Findings,
    allowed: float = 0.0,
) -> None:
    """Adds what is wrong with rendered prompts. allowed: share of rows that training leaves out and names."""
    tokenizer = processor.tokenizer
    special = [str(token) for token in tokenizer.special_tokens_map.values() if len(str(token)) > 2]
    special += [token for token in tokenizer.get_vocab() if token.startswith("<|") and token.endswith("|>")]
    findings.add(probe_placeholders(prompts, list(dict.fromkeys(special))))
    findings.add(probe_system(prompts, lambda prompt: system_is_moved(processor, chat(prompt))))
    findings.add(probe_reading(prompts, lambda prompt: encode(processor, [prompt], max_prompt), allowed))
    findings.add(
        probe_lengths(prompts, lambda text: len(tokenizer(text, add_special_tokens=False).input_ids), max_response)
    )


def rendered(processor: Processor | None, prompt: Prompt) -> str:
    """Returns the text that the model reads, as far as it is known."""
    if processor is None:
        return prompt.text
    try:
        return chat_texts(processor, [prompt])[0]
    except Exception:  # which `probe_reading` has said of this prompt
        return prompt.text
