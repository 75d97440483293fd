"""Letters of options in a string, and the options of a question."""

from __future__ import annotations

import re

from mmrl.rewards.parsing.typography import plain
from mmrl.rewards.parsing.wording import wording

# Scripts without spaces between words: a letter beside theirs stands alone.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]++")
_MARKDOWN = re.compile(r"[*`]++|(?<!\w)_++|_++(?!\w)")
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*+|[{}$]")
# What follows the letter A where it is not an article.
_NO_NOUN = re.compile(
    r"is|was|and|or|because|since|as|but|not|if|would|seems|looks|nor|vs|versus|for|should|must|can|will|fits|matches|"
    r"has|does|alone|only|both|instead|while|so|then|than|with"
)
_NO_VERB = re.compile(r"is|and|or")  # what follows the letter I
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
_WORD = re.compile(r"\b(?!and\b)[A-Za-z][a-z]")
_LETTERS_ONLY = re.compile(r"[A-Z]{2,}+")
_BETWEEN_LETTERS = re.compile(r"[\s,;/&|()\[\].]++|\band\b", re.IGNORECASE)
_LINE = re.compile(r"^[ \t]*+[(\[]?([A-Z])[).:\]][ \t]*+(\S[^\n]*+)$", re.MULTILINE)
_INLINE = re.compile(r"\(([A-Z])\)\s*+([^()\n]++)")


class Letters:
    """Reads which of certain letters a string names as options."""

    def __init__(self, letters: str) -> None:
        self.letters = letters.upper()
        either = f"{re.escape(self.letters)}{re.escape(self.letters.lower())}"
        self._alone = re.compile(rf"(?<![\w'])(\(?)([{either}])(?![\w+#-]|'\w)(\s++\w++|\s*+[).:,;])?")
        self._label = re.compile(rf"\W*+([{either}])(?:\W*+$|\s*+[).:\]])")
        self._noun = re.compile(r"(?:options?|choices?|letters?|answers?)\W{0,3}$", re.IGNORECASE)

    def named(self, text: str) -> list[str]:
        """The letters, as capitals, each once, in their order of appearance.

        A letter stands alone, as a capital, in brackets, behind "option" or where the answer is announced ("the answer
        is b"); A before a noun and I before a verb are words. Where an answer is announced, what comes before does not
        count.
        """
        text = _tidy(text)
        listed = self._listed(text)
        if listed:
            return listed
        announced = 0
        for match in _ANNOUNCED.finditer(text):
            announced = match.end()
        return self._alone_in(text, announced) or (self._alone_in(text, 0) if announced else [])

    def _listed(self, text: str) -> list[str]:
        """Letters of a string that is nothing but letters: "B", "a, c", "AC"."""
        if len(text) > 8 * len(self.letters) or _WORD.search(text):
            return []
        parts = [part for part in _BETWEEN_LETTERS.split(text.strip("\"'*.:() \n")) if part]
        if len(parts) == 1 and _LETTERS_ONLY.fullmatch(parts[0]) and len(set(parts[0])) == len(parts[0]):
            parts = list(parts[0])
        upper = [part.upper() for part in parts]
        return list(dict.fromkeys(upper)) if upper and all(len(p) == 1 and p in self.letters for p in upper) else []

    def _alone_in(self, text: str, begin: int) -> list[str]:
        """Returns the option letters that stand alone in a text from index `begin` on, without words such as "a" and
        "I"."""
        named: dict[str, None] = {}
        for match in self._alone.finditer(text, begin):
            bracket, letter, behind = match[1], match[2], (match[3] or "")
            before = text[max(0, match.start() - 12) : match.start()]
            first = not text[begin : match.start()].strip() if match.start() - begin < 8 else False
            if letter.islower() and not self._is_lower_option(bracket, behind, first, before):
                continue
            if not bracket and self._is_word(letter, behind, before):
                continue
            named[letter.upper()] = None
        return list(named)

    def _is_lower_option(self, bracket: str, behind: str, first: bool, before: str) -> bool:
        """Returns whether a lower-case letter is an option: in brackets, first in the answer, or after a noun such as
        "option"."""
        mark = behind.strip()[:1]
        if bracket:
            return mark == ")"
        if first:
            return not mark or not mark.isalnum()
        return self._noun.search(before) is not None and not (mark.isalnum() and self._is_word("A", behind, ""))

    def _is_word(self, letter: str, behind: str, before: str) -> bool:
        """Returns whether "A" is an article and "I" a pronoun in this text."""
        word = behind.strip().lower()
        if letter.upper() not in "AI" or not word[:1].isalnum():
            return False
        if letter.upper() == "A" and self._noun.search(before) is not None and _NO_NOUN.fullmatch(word):
            return False
        return (_NO_VERB if letter.upper() == "I" else _NO_NOUN).fullmatch(word) is None


def options_of(question: str) -> dict[str, str]:
    """Wordings of a question's options by letter; at least two, A first; {} where the question lists none."""
    for pattern in (_LINE, _INLINE):
        options = {letter: wording(text.strip()) for letter, text in pattern.findall(plain(question))}
        if list(options) == list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(options)]) and len(options) > 1:
            return options
    return {}


def without_lead_in(text: str) -> str:
    """A string without "The answer is" and the like before it."""
    text = _tidy(text).strip()
    lead_in = _LEAD_IN.match(text)
    return text if lead_in is None else text[lead_in.end() :].strip()


def _tidy(text: str) -> str:
    if not text.isascii():
        text = plain(text.replace("\u2014", " - "))
        text = _UNSPACED.sub(" ", text)
    if "\\" in text or "$" in text:
        text = _LATEX.sub("", text)
    return _MARKDOWN.sub("", text) if "*" in text or "_" in text or "`" in text else text
