"""How weights get from training into an engine, and the proof that they arrived."""
