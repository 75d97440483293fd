"""The option letters that a response names, such as "B", and the options of a multiple-choice question."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mmrl.rewards.parsing.typography import normalize_typography
from mmrl.rewards.parsing.wording import normalize_answer

MAX_PER_LETTER = 8  # characters of a list of letters for each letter: it, commas, "and"
# Scripts without spaces between words: a Latin letter beside one of their characters stands alone.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]++")
_MARKDOWN = re.compile(r"[*`]++|(?<!\w)_++|_++(?!\w)")
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*+|[{}$]")
# Words that follow "A" if it is an option and not an article.
_NO_NOUN = re.compile(
    r"is|was|and|or|because|since|as|but|not|if|would|seems|looks|nor|vs|versus|for|should|must|can|will|fits|matches|"
    r"has|does|alone|only|both|instead|while|so|then|than|with"
)
_NO_VERB = re.compile(r"is|and|or")  # words that follow "I" if it is an option and not a pronoun
_ANNOUNCED = re.compile(
    r"(?:\b(?:answers?|choices?|options?|choice|letters?)\b(?:\s+(?:that\s+fits|here))?\s*+(?:is|are|would be|must be|"
    r"should be)\b\s*+:?|\b(?:answers?|solution)\s*+[:=]|\b(?:choose|choosing|chose|pick|select|go with|going with)\b)",
    re.IGNORECASE,
)
_LEAD_IN = re.compile(
    r"(?:so\s|thus\s|therefore\s|hence\s|,|i\s(?:think|believe)\s(?:that\s)?)*+(?:the\s)?(?:(?:correct|right|best|final)"
    r"\s)*+(?:answer|option|choice)\s*+(?:is|:)\s*+:?|it\s(?:is|'s)\s|it's\s",
    re.IGNORECASE,
)
# Words after which other options are named as wrong or as a reason: "B, not A", "B because A is too small".
_REASON = re.compile(r"\b(?:because|since|whereas|unlike|rather\s+than|instead\s+of|not)\b", re.IGNORECASE)
_WORD = re.compile(r"\b(?!and\b)[A-Za-z][a-z]")
_LETTERS_ONLY = re.compile(r"[A-Z]{2,}+")
_BETWEEN_LETTERS = re.compile(r"[\s,;/&|()\[\].]++|\band\b", re.IGNORECASE)
_LINE = re.compile(r"^[ \t]*+[(\[]?([A-Z])[).:\]][ \t]*+(\S[^\n]*+)$", re.MULTILINE)
_INLINE = re.compile(r"\(([A-Z])\)\s*+([^()\n]++)")


class OptionLetterReader:
    """Reads which option letters a text names. letters: the allowed ones, such as "ABCD"."""

    def __init__(self, letters: str) -> None:
        """letters: the allowed option letters, such as "ABCD"."""
        self.letters = letters.upper()
        either = f"{re.escape(self.letters)}{re.escape(self.letters.lower())}"
        # a letter that stands alone: the bracket before it, the letter, and the word or mark after it
        self._alone = re.compile(rf"(?<![\w'])(\(?)([{either}])(?![\w+#-]|'\w)(\s++\w++|\s*+[).:,;])?")
        self._noun = re.compile(r"(?:options?|choices?|letters?|answers?)\W{0,3}$", re.IGNORECASE)

    def read(self, text: str) -> list[str]:
        """Returns the named letters as capitals, each once, in order of appearance.

        A letter counts if it stands alone as a capital, in brackets, after "option", or where the answer is announced
        ("the answer is b"). A before a noun and I before a verb are words. If answers are announced, only the text
        after the last announcement counts, unless it names no letter. Letters after "because", "not" and the like do
        not count if letters are named before it.
        """
        text = _without_markup(text)
        letters = self._only_letters(text)
        if letters:
            return letters
        announced_end = 0
        for match in _ANNOUNCED.finditer(text):
            announced_end = match.end()
        return self._named_letters(text, announced_end) or (self._named_letters(text, 0) if announced_end else [])

    def _only_letters(self, text: str) -> list[str]:
        """Returns the letters of a text that is nothing else: "B", "a, c", "AC"; [] for other texts."""
        if len(text) > MAX_PER_LETTER * len(self.letters) or _WORD.search(text):
            return []
        parts = [part for part in _BETWEEN_LETTERS.split(text.strip("\"'*.:() \n")) if part]
        if len(parts) == 1 and _LETTERS_ONLY.fullmatch(parts[0]) and len(set(parts[0])) == len(parts[0]):
            parts = list(parts[0])
        upper = [part.upper() for part in parts]
        return (
            list(dict.fromkeys(upper))
            if upper and all(len(part) == 1 and part in self.letters for part in upper)
            else []
        )

    def _named_letters(self, text: str, begin: int) -> list[str]:
        """Returns the option letters that a text names from index `begin` on, up to the first reason that follows one
        of them."""
        letters: dict[str, None] = {}
        end = len(text)
        for position, letter in self._standalone_letters(text, begin):
            if not letters and (reason := _REASON.search(text, position)) is not None:
                end = reason.start()
            if position >= end:
                break
            letters[letter] = None
        return list(letters)

    def _standalone_letters(self, text: str, begin: int) -> Iterator[tuple[int, str]]:
        """Yields the option letters that stand alone in a text from index `begin` on, as capitals, each with its index;
        the words "a" and "I" do not count."""
        for match in self._alone.finditer(text, begin):
            bracket, letter, following = match[1], match[2], (match[3] or "")
            preceding = text[max(0, match.start() - 12) : match.start()]  # long enough for "options: "
            # Only a few characters are looked at, so that the time grows linearly.
            is_first = match.start() - begin < 8 and not text[begin : match.start()].strip()
            if letter.islower() and not self._is_lower_option(bracket, following, is_first, preceding):
                continue
            if not bracket and _is_english_word(letter, following):
                continue
            yield match.start(), letter.upper()

    def _is_lower_option(self, bracket: str, following: str, is_first: bool, preceding: str) -> bool:
        """Returns whether a lower-case letter is an option: in brackets, first in the answer, or after a noun such as
        "option".

        bracket: the opening bracket before it, or "". following: the word or mark after it. is_first: whether the
        answer begins with it. preceding: the last characters before it.
        """
        mark = following.strip()[:1]
        if bracket:
            return mark == ")"
        if is_first:
            return not mark or not mark.isalnum()
        # after "option", unless a word follows that makes it a word, as a noun does after the article "a"
        return self._noun.search(preceding) is not None and not (mark.isalnum() and _is_english_word("A", following))


def _is_english_word(letter: str, following: str) -> bool:
    """Returns whether a letter "A" is an article, or "I" a pronoun. following: the word or mark after it."""
    word = following.strip().lower()
    if letter.upper() not in "AI" or not word[:1].isalnum():
        return False
    # before a word that cannot follow the pronoun or the article, the letter is an option
    return (_NO_VERB if letter.upper() == "I" else _NO_NOUN).fullmatch(word) is None


def parse_options(question: str) -> dict[str, str]:
    """Returns the texts of a question's options by letter, normalised by `normalize_answer`: two or more, from A on; {}
    if the question lists none."""
    for pattern in (_LINE, _INLINE):
        lines = pattern.findall(normalize_typography(question))
        options = {letter: normalize_answer(text.strip()) for letter, text in lines}
        if list(options) == list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(options)]) and len(options) > 1:
            return options
    return {}


def strip_lead_in(text: str) -> str:
    """Removes "The answer is" and the like from the beginning of a text."""
    text = _without_markup(text).strip()
    lead_in = _LEAD_IN.match(text)
    return text if lead_in is None else text[lead_in.end() :].strip()


def _without_markup(text: str) -> str:
    """Removes Markdown and LaTeX commands, normalises the typography, and replaces text in scripts without spaces by a
    space."""
    if not text.isascii():
        text = normalize_typography(text.replace("\u2014", " - "))
        text = _UNSPACED.sub(" ", text)
    if "\\" in text or "$" in text:
        text = _LATEX.sub("", text)
    return _MARKDOWN.sub("", text) if "*" in text or "_" in text or "`" in text else text
