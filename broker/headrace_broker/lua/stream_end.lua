-- Ends a stream from outside: whoever writes to it is fenced, and a claim finds it ended.
-- KEYS: stream, mark of its end. ARGV: data of the end entry, seconds to live, seconds to live of a stream whose message may
-- lie in the queue, seconds that the mark outlives the stream; from a worker also the digest of its message's content.
-- Returns nothing, or the data of the end entry that was there already, or '' where the stream is another message's.
local content = ARGV[5]
if content and redis.call('TYPE', KEYS[1]).ok ~= 'stream' then redis.call('DEL', KEYS[1]) end
local last, attempt, tokens = usable_tail(KEYS[1])
if last and content and is_of_another(KEYS[1], content) then return '' end
if last and field(last, 'type') == 'end' then return field(last, 'data') end
-- that of a request that was handed back lives for longer until it is claimed
local is_queued = not last or redis.call('EXPIRE', KEYS[1], ARGV[2] + 1, 'GT') == 0
local seconds = is_queued and ARGV[3] or ARGV[2]
append(KEYS[1], attempt + 1, tokens + 1, 'end', ARGV[1])
redis.call('EXPIRE', KEYS[1], seconds)
redis.call('SET', KEYS[2], '1', 'EX', seconds + ARGV[4])
return false
