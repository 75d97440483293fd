"""Parts of a vision-language policy, by what they do with responses."""
