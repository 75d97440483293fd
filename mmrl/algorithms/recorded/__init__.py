"""Learning from recorded episodes, failures too, without a simulator's new ones."""
