"""The nouns: types that cross folder borders. Host modules never import torch; batch, draft, verification and kv are the device half."""
