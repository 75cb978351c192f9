-- Ends a stream without a claim. The worker that writes to it is fenced, and the next claim finds it ended.
-- KEYS: STREAM, ENDED
-- ARGV: data, begun_seconds, queued_seconds, content, least
-- data: of the end entry. begun_seconds: lifetime of the stream. queued_seconds: its lifetime if the message may still
-- be in the queue. content: digest of the message's content; absent if a client cancels, as it does not know the
-- digest. least: the lowest number that the end may have as an attempt, or absent. A reader of a stream that was lost with
-- its server has its entries, and would not read an end with a lower id.
-- Returns nothing if this call ended the stream, the data of an earlier end entry, or '' if the stream belongs to
-- another message.
if content and redis.call('TYPE', STREAM).ok ~= 'stream' then redis.call('DEL', STREAM) end
local last, attempt, tokens = usable_tail(STREAM)
if last and content and is_of_another(STREAM, content) then return '' end
if last and field(last, 'type') == 'end' then -- repeats what Redis may have refused after the end
  redis.call('EXPIRE', STREAM, begun_seconds, 'NX')
  redis.call('SET', ENDED, '1', 'EX', begun_seconds + ENDED_SECONDS, 'NX')
  return field(last, 'data')
end
-- the stream of a request that was returned to the queue has a longer life until it is claimed
local is_queued = not last or redis.call('EXPIRE', STREAM, begun_seconds + 1, 'GT') == 0
local seconds = is_queued and queued_seconds or begun_seconds
append(STREAM, math.max(attempt + 1, math.min(tonumber(least or 0), HIGHEST_COUNT - 1)), tokens + 1, 'end', data)
redis.call('EXPIRE', STREAM, seconds)
redis.call('SET', ENDED, '1', 'EX', seconds + ENDED_SECONDS)
return false
