-- Begins the next attempt at a request and returns the entries of the earlier ones, whose workers can no longer write.
-- KEYS: STREAM, ENGINE_LOSSES, ENDED
-- RIGHTS: STREAM
-- ARGV: data, seconds, content
-- ENDED: deleted, as it may remain from before the request was requeued. data: of the start entry. seconds: lifetime of
-- the stream. content: digest of the message.
-- Returns {number of the attempt, state, entries, number of engine losses, 1 if an unusable stream was deleted else 0}.
-- State is 0 if the attempt has begun, 1 if the stream had ended, 2 if it belongs to another message. An entry is
-- written only for state 0.
local last, attempt, _, replaced = usable_tail(STREAM)
if last and is_of_another(STREAM, content) then return {attempt, 2, {}, 0, replaced} end
local losses = redis.pcall('GET', ENGINE_LOSSES) -- a key of another type counts as 0
losses = type(losses) == 'string' and tonumber(losses) or 0
local entries = last and redis.call('XRANGE', STREAM, '-', '+') or {}
if last and field(last, 'type') == 'end' then return {attempt, 1, entries, losses, replaced} end
append(STREAM, attempt + 1, 0, 'start', data)
redis.call('EXPIRE', STREAM, seconds)
redis.call('DEL', ENDED)
return {attempt + 1, 0, entries, losses, replaced}
