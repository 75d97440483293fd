"""Sections of a configuration: what they are, how files and overrides become one, and how it is written again."""

from mmrl.settings.section import (
    NOTHING,
    Choice,
    Section,
    SettingsError,
    choices_in,
    choose,
    has_key,
    kind_of,
    load_attribute,
    locate,
    make,
    option,
    plain,
    with_types,
    without_keys,
)

__all__ = [
    "Choice",
    "NOTHING",
    "Section",
    "SettingsError",
    "choices_in",
    "choose",
    "has_key",
    "kind_of",
    "load_attribute",
    "locate",
    "make",
    "option",
    "plain",
    "with_types",
    "without_keys",
]
