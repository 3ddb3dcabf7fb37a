"""Whether speculation changes the output: the same tokens in both arms, and the law of every sampling option."""
