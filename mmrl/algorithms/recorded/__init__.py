"""Learning from recorded episodes, including failures, without new episodes in a simulator."""
