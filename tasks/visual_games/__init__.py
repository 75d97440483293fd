"""Games that are observed as images and played over several turns."""
