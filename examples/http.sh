#!/bin/sh
# Request a completion over HTTP with curl, streamed and whole; any language can do the same. Needs `headrace serve` or a gateway.
set -eu
url="${HEADRACE_URL:-http://127.0.0.1:8000}"
model="${MODEL:-smollm2-135m-instruct}"
ask() {
    curl -sS --fail-with-body -N "$url/v1/completions" \
        -H "Authorization: Bearer ${HEADRACE_API_KEY:-none}" -H 'Content-Type: application/json' \
        -d "{\"model\": \"$model\", \"prompt\": \"Name three rivers.\", \"max_tokens\": 16, \"stream\": $1}"
}
ask true
ask false
