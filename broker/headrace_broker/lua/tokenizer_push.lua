-- Put a call of a tokenizer behind those that wait.
-- KEYS: TOKENIZER_CALLS
-- ARGV: call, most, call_ms, list_ms
-- call_ms: how long it may wait. list_ms: how long the list lives, in which those before it may wait longer. Returns 0 where
-- as many wait as may.
if redis.call('LLEN', TOKENIZER_CALLS) >= tonumber(most) then return 0 end
local now = redis.call('TIME')
local ends = now[1] * 1000 + math.floor(now[2] / 1000) + call_ms
redis.call('RPUSH', TOKENIZER_CALLS, string.format('%.0f|', ends) .. call)
redis.call('PEXPIRE', TOKENIZER_CALLS, list_ms)
return 1
