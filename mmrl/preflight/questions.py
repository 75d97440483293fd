"""All probes of a job of visual questions, in their order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mmrl.config import Config
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.prompts import chat, chat_texts, encode
from mmrl.policies.vlm.settings import TokenLimits, VisionLanguageModel
from mmrl.policies.vlm.templates import system_is_moved
from mmrl.preflight.alarms import Findings
from mmrl.preflight.boxes import probe_boxes
from mmrl.preflight.golds import Marks, Reasons, probe_golds, tried
from mmrl.preflight.page import Row
from mmrl.preflight.prompts import sampled
from mmrl.preflight.readers import probe_lengths, probe_placeholders, probe_reading, probe_system
from mmrl.rollouts import Prompt
from mmrl.tasks.visual_qa.settings import VisualQASettings
from mmrl.tasks.visual_qa.task import VisualQA

TRIED = 24  # rows whose golds are tried
SHOWN = 8  # prompts on a page
REWARDS, ACCURACY = "task.rewards", "task.accuracy"


@contextmanager
def collected() -> Iterator[Reasons]:
    """Collects what rewards log of samples that they could not score."""
    reasons, logger = Reasons(), logging.getLogger("mmrl.rewards")
    logger.addHandler(reasons)
    try:
        yield reasons
    finally:
        logger.removeHandler(reasons)


def probe_questions(
    config: Config, settings: VisualQASettings, task: VisualQA, processor: Processor | None, findings: Findings
) -> list[Row]:
    """Adds what is wrong with golds, boxes, lengths and templates; returns rows for a page. processor: of the model,
    None where it is not at hand."""
    source = task.evaluation if task.train is None else task.train
    lengths = config.section("rollout")
    rows, marks = sampled(source, TRIED), dict[str, list[Marks]]()
    if not isinstance(lengths, TokenLimits):
        findings.unread.append(("rewards", "demonstrations are learned from, and not scored"))
        return [Row(prompt, rendered(processor, prompt)) for prompt in rows[:SHOWN]]
    limit = int(lengths.max_response_length.extremes[1])
    if task.environment is not None:
        findings.unread.append(("rewards", "golds of conversations with an environment are not tried"))
    else:
        with findings.guarded("rewards"), collected() as reasons:
            marks = tried(rows, task.score, list(task.reward_names), limit)
            findings.add(probe_golds(marks, REWARDS, reasons.by_name(list(marks))))
        with findings.guarded("rewards"), collected() as reasons:
            name = settings.accuracy.column
            of_accuracy = tried(rows, lambda samples, group: task.accuracy(samples)[:, None], [name], limit)
            findings.add(probe_golds(of_accuracy, ACCURACY, reasons.by_name([name])))
        specs = [*settings.rewards, settings.accuracy]
        options = config.model.processor if isinstance(config.model, VisionLanguageModel) else {}
        findings.add(probe_boxes(sampled(source), specs, options, REWARDS))
    if processor is None:
        findings.unread.append(("template", "prompts are not rendered: the model's processor is not at hand"))
    else:
        probe_template(sampled(source), processor, lengths.max_prompt_length, limit, findings)
    return [
        Row(prompt, rendered(processor, prompt), {name: of[row] for name, of in marks.items()})
        for row, prompt in enumerate(rows[:SHOWN])
    ]


def probe_template(
    prompts: Sequence[Prompt], processor: Processor, max_prompt: int, max_response: int, findings: Findings
) -> None:
    tokenizer = processor.tokenizer
    special = [str(token) for token in tokenizer.special_tokens_map.values() if len(str(token)) > 2]
    special += [token for token in tokenizer.get_vocab() if token.startswith("<|") and token.endswith("|>")]
    findings.add(probe_placeholders(prompts, list(dict.fromkeys(special))))
    findings.add(probe_system(prompts, lambda prompt: system_is_moved(processor, chat(prompt))))
    findings.add(probe_reading(prompts, lambda prompt: encode(processor, [prompt], max_prompt)))
    findings.add(
        probe_lengths(prompts, lambda text: len(tokenizer(text, add_special_tokens=False).input_ids), max_response)
    )


def rendered(processor: Processor | None, prompt: Prompt) -> str:
    """Returns the text that the model reads, as far as it can be told."""
    if processor is None:
        return prompt.text
    try:
        return chat_texts(processor, [prompt])[0]
    except Exception:  # which `probe_reading` has said of this prompt
        return prompt.text
