"""The kinds of questions, and the names of what they are about, of the data that come with mmrl."""

from typing import Literal

Question = Literal["which", "sum", "largest", "above_five", "where"]
VideoQuestion = Literal["direction", "speed", "order"]
VIDEO_QUESTIONS: tuple[VideoQuestion, ...] = ("direction", "speed", "order")
EVERY: tuple[Question, ...] = ("which", "sum", "largest", "above_five", "where")
NamedQuestion = Literal["alone", "alike", "what", "left_of", "right_of", "where", "how_many", "all"]
NAMED: tuple[NamedQuestion, ...] = ("what", "left_of", "right_of", "where", "how_many")
NamedPart = Literal["all", "shown", "heldout"]
NamedStyle = Literal["noto", "fluent", "openmoji"]
ChartQuestion = Literal["largest", "value", "above", "difference"]
CHART_QUESTIONS: tuple[ChartQuestion, ...] = ("largest", "value", "above", "difference")
ChartTable = Literal["barley", "iowa-electricity", "stocks", "us-employment", "wheat", "driving", "crimea"]
ChartShape = Literal["bar", "line"]
