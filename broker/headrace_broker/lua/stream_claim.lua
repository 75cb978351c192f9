-- Begins the next attempt at a request, which fences all earlier ones, and reads what they wrote.
-- KEYS: stream, engine losses, mark of the stream's end, which an earlier life of the request may have left.
-- ARGV: data of the start entry, seconds to live.
-- Returns {attempt, 1 if the stream had ended (then nothing was written), entries, engine losses}.
local last, attempt = tail(KEYS[1])
local losses = tonumber(redis.call('GET', KEYS[2]) or 0) or 0
local entries = last and redis.call('XRANGE', KEYS[1], '-', '+') or {}
if last and field(last, 'type') == 'end' then return {attempt, 1, entries, losses} end
append(KEYS[1], attempt + 1, 0, 'start', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[3])
return {attempt + 1, 0, entries, losses}
