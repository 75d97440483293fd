"""Servers of trained policies: `mmrl serve RUN`. `chat.py` speaks OpenAI's protocol for models that answer in text,
`robot.py` openpi's for models that act. tests/serving asks both with the published clients."""
