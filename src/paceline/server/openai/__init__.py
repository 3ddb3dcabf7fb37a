"""OpenAI's API as types: what a request may hold, what an answer and an error look like on the wire."""
