-- Puts one dead letter back into its queue, and deletes what is left of its first run.
-- KEYS: dead letters, list, messages by lease id, lease ids by request id, then what to delete, the stream first.
-- ARGV: the letter as it lies there, the message, its request id, the digest of its content.
-- Returns 1, or 0 where the letter stays: it is no longer among the dead letters, its message is known and not dead, or its
-- request id or its stream is another message's, which must not be deleted.
local list, stream = redis.call('TYPE', KEYS[2]).ok, KEYS[5]
if list ~= 'list' and list ~= 'none' then
  return {err = string.format('WRONGTYPE the list %s holds a %s: restore or delete it', (string.gsub(KEYS[2], '%c+', ' ')), list)}
end
if redis.call('HEXISTS', KEYS[3], lease_id_of(ARGV[2])) == 1 then return 0 end
local holder = redis.call('HGET', KEYS[4], ARGV[3])
if holder and redis.call('HEXISTS', KEYS[3], holder) == 1 then return 0 end
if redis.call('TYPE', stream).ok == 'stream' and is_of_another(stream, ARGV[4]) then return 0 end
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
for i = 5, #KEYS do redis.call('DEL', KEYS[i]) end
redis.call('LPUSH', KEYS[2], ARGV[2])
return 1
