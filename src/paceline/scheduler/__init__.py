"""What runs next: sequences, pages, the prefix cache and the draft length. Torch-free; the engine loop calls it, the executor obeys it."""
