"""Visual question answering with checkable answers: digits, files of the user, or a Hugging Face dataset."""
