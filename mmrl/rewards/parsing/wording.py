"""Normalises answers for comparison: case, spaces, punctuation around words, articles."""

from __future__ import annotations

import re

from mmrl.rewards.parsing.typography import normalize_case

ARTICLES = frozenset({"a", "an", "the"})
# After these words, and at the beginning, "a" is an article; after a noun it is a name, as in "vitamin A".
_BEFORE_AN_ARTICLE = re.compile(
    r"and|or|but|nor|with|without|of|on|in|at|by|to|for|from|is|are|was|were|as|into|under|over|near|behind|beside|"
    r"above|below|between|holds|has|have|wears|wearing|holding|riding|like|than"
)
_LEFT, _RIGHT = "\"'*`.,;:!?([{\xbf\xa1", "\"'*`.,;:!?)]}"
_LEFT_OF_LISTS = "\"'*`.,;:!?\xbf\xa1"
_AFTER_A_DIGIT = "*`.,;:?)]}"  # 5! is not 5, and 5' is five feet
_MAX_WORD = 64  # letters of a word in which an opening bracket is searched
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_THOUSANDS = re.compile(
    r"(?<![\d.,'])(?:\d{1,3}+(?:,\d{3})++|\d{1,3}+(?:'\d{3})++|\d{1,2}+(?:,\d\d(?=,))++,\d{3})(?![,']?\d)"
)
_LIST = re.compile(r"[(\[{][^()\[\]{},]*+,")
_AFTER_COMMAS = re.compile(r",\s++(?=[-+.\d])")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)++[^\W\d_]")
_BEFORE_UNITS = re.compile(r"(?<=\d)\s++(?=[%\xb0])")
_BRACED_POWER = re.compile(r"\^\{([^{}]*+)\}")


def normalize_answer(text: str, articles: bool = False, punctuation: bool = False) -> str:
    """Returns the words of an answer with single spaces, in one case and typography; "" only for an empty answer.

    punctuation: keep marks around words (quotes, brackets, full stops and the like), commas between thousands and the
    points of initials. Marks that change the answer always stay: signs, units, operators, marks between digits,
    brackets around lists. articles: keep a, an and the. Without it they are removed before a word; "a" alone or after a
    noun is a name and stays. An answer of nothing but marks or articles is returned with its words unchanged.
    """
    text = normalize_case(text)
    if text.isalnum():
        return text
    raw_words = text.split()
    words = raw_words if punctuation else _strip_marks(text)
    if not articles:
        words = [word for i, word in enumerate(words) if word and not _is_article(words, i)]
    return " ".join(word for word in words if word) or " ".join(raw_words)


def _is_article(words: list[str], i: int) -> bool:
    """Returns whether word i is an article, not the letter of an option."""
    if words[i] not in ARTICLES or i + 1 == len(words) or not words[i + 1]:
        return False
    if words[i] == "the":
        return True
    # "A B" are two option letters, and so are "A, B", where `_strip_marks` leaves "a,", which is no article.
    return len(words[i + 1]) > 1 and (
        words[i] == "an" or i == 0 or _BEFORE_AN_ARTICLE.fullmatch(words[i - 1]) is not None
    )


def _strip_marks(text: str) -> list[str]:
    """Returns the words of a text without the marks around them. "a," keeps its comma, since it is not an article."""
    if "," in text or "'" in text:
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", "").replace("'", ""), text)
    if "%" in text or "\xb0" in text:
        text = _BEFORE_UNITS.sub("", text)
    if "^{" in text:
        text = _BRACED_POWER.sub(r"^\1", text)
    is_list = "," in text and _LIST.search(text) is not None
    if is_list:
        text = _AFTER_COMMAS.sub(",", text)
    return [word if word.isalnum() else _strip_word(word, is_list) for word in text.split()]


def _strip_word(word: str, is_list: bool) -> str:
    """Strips the punctuation around a word, and the points of initials. is_list: the text is a list such as "[a, b]",
    whose commas and brackets stay."""
    begin, end = 0, len(word)
    left = _LEFT_OF_LISTS if is_list else _LEFT
    while begin < end and word[begin] in left:
        begin += 1
    if begin and word[begin - 1] == "." and word[begin : begin + 1].isdigit():
        begin -= 1  # .5
    while end > begin and _is_outer_mark(word, begin, end, is_list):
        end -= 1
    inner = word[begin:end]
    return inner.replace(".", "") if _INITIALS.fullmatch(inner) else inner


def _is_outer_mark(word: str, begin: int, end: int, is_list: bool) -> bool:
    """Returns whether the mark before index `end` stands around the word and is not part of it. begin, end: bounds of
    the word without the marks that are stripped already. is_list: as for `_strip_word`."""
    mark = word[end - 1]
    # an article with a comma, as in "a, b", is an option's letter: the comma stays
    if mark not in _RIGHT or (mark == "," and end - begin <= 4 and word[begin : end - 1] in ARTICLES):
        return False
    if mark in _BRACKETS:  # a bracket that was opened inside the word stays
        return not is_list and word.find(_BRACKETS[mark], begin, begin + _MAX_WORD) < 0
    quoted = begin > 0 and word[begin - 1] == mark
    # right after a digit, other marks change it, as in 5! and 5'
    return mark in _AFTER_A_DIGIT or quoted or end - 1 <= begin or not word[end - 2].isdigit()
