-- Appends a tokenizer call to the list of waiting calls.
-- KEYS: TOKENIZER_CALLS
-- RIGHTS: TOKENIZER_CALLS
-- ARGV: call, max_calls, call_ms, list_ms
-- call_ms: milliseconds that this call may wait. list_ms: lifetime of the list in milliseconds. It does not depend on
-- call_ms, because earlier calls may wait longer.
-- Returns 1, or 0 if the list has max_calls already.
if redis.call('LLEN', TOKENIZER_CALLS) >= tonumber(max_calls) then return 0 end
local now = redis.call('TIME')
local ends = now[1] * 1000 + math.floor(now[2] / 1000) + call_ms
redis.call('RPUSH', TOKENIZER_CALLS, string.format('%.0f|', ends) .. call)
redis.call('PEXPIRE', TOKENIZER_CALLS, list_ms)
return 1
