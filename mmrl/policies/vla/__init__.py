"""Vision-language-action policies: chunks of actions from images, instructions and robot states, with likelihoods."""
