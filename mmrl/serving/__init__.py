"""Servers of trained policies, for `mmrl serve RUN`: `chat.py` has OpenAI's protocol for models that answer in text,
`robot.py` openpi's for models that control a robot. tests/serving calls both with the published clients."""
