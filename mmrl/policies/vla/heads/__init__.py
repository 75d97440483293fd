"""Action heads: from the hidden states of a backbone to actions and their likelihoods."""
