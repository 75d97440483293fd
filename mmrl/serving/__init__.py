"""Servers of trained policies: `mmrl serve RUN`. `chat.py` speaks OpenAI's protocol for language models; a
protocol of robots would stand beside it. tests/serving asks with the published client."""
