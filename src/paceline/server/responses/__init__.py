"""OpenAI's `/v1/responses` over the core of chat: requests into chat requests, output into items and events, and a store of answers."""
