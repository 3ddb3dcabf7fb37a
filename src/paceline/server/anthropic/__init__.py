"""Anthropic's Messages API on the core of chat: bodies in, whole messages, events and errors out."""
