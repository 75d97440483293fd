"""The wording of an answer in words, without what says nothing: case, spaces, marks around words, articles."""

from __future__ import annotations

import re

from mmrl.rewards.parsing.typography import folded

ARTICLES = frozenset({"a", "an", "the"})
# After these, and at the beginning, "a" is an article; after a noun it is a name, as in "vitamin A".
_BEFORE_AN_ARTICLE = re.compile(
    r"and|or|but|nor|with|without|of|on|in|at|by|to|for|from|is|are|was|were|as|into|under|over|near|behind|beside|"
    r"above|below|between|holds|has|have|wears|wearing|holding|riding|like|than"
)
_LEFT, _RIGHT = "\"'*`.,;:!?([{\xbf\xa1", "\"'*`.,;:!?)]}"
_LEFT_OF_LISTS = "\"'*`.,;:!?\xbf\xa1"
_AFTER_A_DIGIT = "*`.,;:?)]}"  # 5! is no 5, and 5' are five feet
_LONGEST = 64  # letters of a word in which an opening bracket is looked for
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_THOUSANDS = re.compile(
    r"(?<![\d.,'])(?:\d{1,3}+(?:,\d{3})++|\d{1,3}+(?:'\d{3})++|\d{1,2}+(?:,\d\d(?=,))++,\d{3})(?![,']?\d)"
)
_LIST = re.compile(r"[(\[{][^()\[\]{},]*+,")
_AFTER_COMMAS = re.compile(r",\s++(?=[-+.\d])")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)++[^\W\d_]")
_BEFORE_UNITS = re.compile(r"(?<=\d)\s++(?=[%\xb0])")
_BRACED_POWER = re.compile(r"\^\{([^{}]*+)\}")


def wording(text: str, articles: bool = False, punctuation: bool = False) -> str:
    """The words of an answer with single spaces, in one case and typography; "" only where the answer is empty.

    Unless kept by `punctuation`, marks around words are left out (quotes, brackets, full stops and the like), commas
    between thousands and the points of initials. Marks that make another answer of it stay: signs, units, operators,
    what stands between digits, brackets around lists. Unless kept by `articles`, a, an and the are left out where a
    word follows; "a" alone or after a noun is a name. An answer that is nothing but marks or articles stays as it is.
    """
    text = folded(text)
    if text.isalnum():
        return text
    raw = text.split()
    words = raw if punctuation else _bare_words(text)
    if not articles:
        words = [word for i, word in enumerate(words) if word and not _is_article(words, i)]
    return " ".join(word for word in words if word) or " ".join(raw)


def _is_article(words: list[str], i: int) -> bool:
    """Returns whether word i is an article, not the letter of an option."""
    if words[i] not in ARTICLES or i + 1 == len(words) or not words[i + 1]:
        return False
    if words[i] == "the":
        return True
    # "A B" and "A, B" are two letters; the comma is still there where it stood behind an article.
    return len(words[i + 1]) > 1 and (
        words[i] == "an" or i == 0 or _BEFORE_AN_ARTICLE.fullmatch(words[i - 1]) is not None
    )


def _bare_words(text: str) -> list[str]:
    """Words without the marks around them; "a," keeps its comma, for it is not an article."""
    if "," in text or "'" in text:
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", "").replace("'", ""), text)
    if "%" in text or "\xb0" in text:
        text = _BEFORE_UNITS.sub("", text)
    if "^{" in text:
        text = _BRACED_POWER.sub(r"^\1", text)
    listed = "," in text and _LIST.search(text) is not None
    if listed:
        text = _AFTER_COMMAS.sub(",", text)
    return [word if word.isalnum() else _bare(word, listed) for word in text.split()]


def _bare(word: str, listed: bool) -> str:
    """Strips the punctuation around a word, and the dots of initials. listed: whether the word is one of a list "a, b",
    whose commas are kept."""
    begin, end = 0, len(word)
    left = _LEFT_OF_LISTS if listed else _LEFT
    while begin < end and word[begin] in left:
        begin += 1
    if begin and word[begin - 1] == "." and word[begin : begin + 1].isdigit():
        begin -= 1  # .5
    while end > begin and _is_outside(word, begin, end, listed):
        end -= 1
    inner = word[begin:end]
    return inner.replace(".", "") if _INITIALS.fullmatch(inner) else inner


def _is_outside(word: str, begin: int, end: int, listed: bool) -> bool:
    """Returns whether the mark before `end` is around the word and no part of it."""
    mark = word[end - 1]
    if mark not in _RIGHT or (mark == "," and end - begin <= 4 and word[begin : end - 1] in ARTICLES):
        return False
    if mark in _BRACKETS:
        return not listed and word.find(_BRACKETS[mark], begin, begin + _LONGEST) < 0
    quoted = begin > 0 and word[begin - 1] == mark
    return mark in _AFTER_A_DIGIT or quoted or end - 1 <= begin or not word[end - 2].isdigit()
