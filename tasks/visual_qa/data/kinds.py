"""The kinds of questions of the data that come with mmrl, and further choices: names, styles, tables and shapes."""

from typing import Literal

DigitsKind = Literal["which", "sum", "largest", "above_five", "where"]
VideoQuestion = Literal["direction", "speed", "order"]
VIDEO_QUESTIONS: tuple[VideoQuestion, ...] = ("direction", "speed", "order")
DIGITS_QUESTIONS: tuple[DigitsKind, ...] = ("which", "sum", "largest", "above_five", "where")
NamedQuestion = Literal["alone", "alike", "what", "left_of", "right_of", "where", "how_many", "all"]
NAMED_QUESTIONS: tuple[NamedQuestion, ...] = ("what", "left_of", "right_of", "where", "how_many")
NamesSplit = Literal["all", "shown", "heldout"]  # "shown": those to train on
NamedStyle = Literal["noto", "fluent", "openmoji"]
ChartQuestion = Literal["largest", "value", "above", "difference"]
CHART_QUESTIONS: tuple[ChartQuestion, ...] = ("largest", "value", "above", "difference")
ChartTable = Literal["barley", "iowa-electricity", "stocks", "us-employment", "wheat", "driving", "crimea"]
ChartShape = Literal["bar", "line"]
StillLifeColour = Literal["red", "green", "blue", "yellow", "purple"]
STILL_LIFE_COLOURS: tuple[StillLifeColour, ...] = ("red", "green", "blue", "yellow", "purple")
STILL_LIFE_GRID = 4  # cells along each side of a still life, which demonstrations zoom to
