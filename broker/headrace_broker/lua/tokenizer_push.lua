-- Put a call of a tokenizer behind those that wait. KEYS: the list. ARGV: the call, most that may wait, milliseconds
-- that it may wait, milliseconds that the list lives, in which those before it may wait longer. Returns 0 where as many
-- wait as may.
if redis.call('LLEN', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
local now = redis.call('TIME')
local ends = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[3]
redis.call('RPUSH', KEYS[1], string.format('%.0f|', ends) .. ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
