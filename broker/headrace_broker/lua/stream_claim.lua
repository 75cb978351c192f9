-- Begins the next attempt at a request, which fences all earlier ones, and reads what they wrote.
-- KEYS: stream, engine losses, mark of the stream's end, which an earlier life of the request may have left.
-- ARGV: data of the start entry, seconds to live, digest of the message's content.
-- Returns {attempt, state, entries, engine losses, 1 if the stream was deleted first}. State is 0 where the attempt has
-- begun, 1 where the stream had ended, 2 where it is another message's: then nothing was written.
local last, attempt, _, replaced = usable_tail(KEYS[1])
if last and is_of_another(KEYS[1], ARGV[3]) then return {attempt, 2, {}, 0, replaced} end
local losses = redis.pcall('GET', KEYS[2]) -- where it is of another type, nothing is known
losses = type(losses) == 'string' and tonumber(losses) or 0
local entries = last and redis.call('XRANGE', KEYS[1], '-', '+') or {}
if last and field(last, 'type') == 'end' then return {attempt, 1, entries, losses, replaced} end
append(KEYS[1], attempt + 1, 0, 'start', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[3])
return {attempt + 1, 0, entries, losses, replaced}
