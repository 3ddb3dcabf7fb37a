"""Model output to message parts: reasoning, tool calls and content, as the text comes. Pure host code, one parser per running answer."""
