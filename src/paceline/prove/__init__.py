"""`paceline prove`: measures any OpenAI server over HTTP, plain against accelerated, and judges it with honest statistics.

Prompts (`datasets/`) become a schedule, the schedule raw records, records summaries, summaries a verdict. No torch, no engine, no server.
"""
