-- Begins an attempt at a request and returns the entries of the earlier ones, whose workers can no longer write. Its
-- number is that of the worker's lease, so a claim that arrives late cannot fence the holder of a later lease.
-- KEYS: STREAM, ENGINE_LOSSES, ENDED
-- RIGHTS: STREAM
-- ARGV: data, seconds, content, grant, owner
-- ENDED: deleted, as it may remain from before the request was requeued. data: of the start entry. seconds: lifetime of
-- the stream. content: digest of the message. grant: number of the lease, owner: who has it (`Grant`); both '' for a
-- worker that does not know them, and then the attempt follows the last one.
-- Returns {number of the attempt, state, entries, number of engine losses, 1 if an unusable stream was deleted else 0}.
-- State is 0 if the attempt has begun, 1 if the stream had ended, 2 if it belongs to another message, 3 if an attempt with
-- this number or a higher one was begun under another lease. An entry is written only for state 0, unless this is a
-- repeated claim whose reply was lost. In state 3 there are no entries, and the number is that of the last attempt.

-- Returns whether the start entry of this attempt names this owner.
local function is_begun_by(key, number, by)
  local id = string.format('%.0f-0', number)
  local start = redis.call('XRANGE', key, id, id)[1]
  local readable, data = pcall(cmsgpack.unpack, start and field(start, 'data') or '')
  return readable and type(data) == 'table' and data.owner == by
end

local last, attempt, _, replaced = usable_tail(STREAM)
if last and is_of_another(STREAM, content) then return {attempt, 2, {}, 0, replaced} end
local losses = redis.pcall('GET', ENGINE_LOSSES) -- a key of another type counts as 0
losses = type(losses) == 'string' and tonumber(losses) or 0
local entries = last and redis.call('XRANGE', STREAM, '-', '+') or {}
if last and field(last, 'type') == 'end' then return {attempt, 1, entries, losses, replaced} end
local number = tonumber(grant) or attempt + 1
if last and attempt >= number then
  if attempt > number or not is_begun_by(STREAM, number, owner) then return {attempt, 3, {}, 0, replaced} end
  return {attempt, 0, entries, losses, replaced}
end
append(STREAM, number, 0, 'start', data)
redis.call('EXPIRE', STREAM, seconds)
redis.call('DEL', ENDED)
return {number, 0, entries, losses, replaced}
