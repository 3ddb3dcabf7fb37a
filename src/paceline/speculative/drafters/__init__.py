"""One file per drafter; each is named in `speculative.drafter.DRAFTERS` and knows no other."""
