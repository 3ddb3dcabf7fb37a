#!/usr/bin/env bash
# The HTTP interface by hand, against a running server. PACELINE_URL names another one.
set -euo pipefail
url=${PACELINE_URL:-http://127.0.0.1:8000}

curl --fail-with-body --silent --show-error "$url/v1/models"
echo

# One answer, with the acceptance of its drafts under "metrics".
curl --fail-with-body --silent --show-error "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 40, "temperature": 0}'
echo

# The same as a stream of events.
curl --fail-with-body --silent --show-error --no-buffer "$url/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "one two three four one two three", "max_tokens": 12, "temperature": 0, "stream": true}'

# What the engine counted.
curl --fail-with-body --silent --show-error "$url/metrics" | grep '^vllm:spec_decode_num_'
