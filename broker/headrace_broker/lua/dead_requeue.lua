-- Puts one dead letter back into its queue, as if it had just been sent: what is known of its first life is forgotten.
-- KEYS: dead letters, list, messages by lease id, lease ids by request id, then what to forget. ARGV: the letter as it lies
-- there, the message, its request id. Returns 1, or 0 where it is no longer among the dead letters, or is a copy of a
-- message that waits or is being worked on, or has its request id: that one's stream must not be deleted.
local list = redis.call('TYPE', KEYS[2]).ok
if list ~= 'list' and list ~= 'none' then
  return {err = string.format('WRONGTYPE the list %s holds a %s: restore or delete it', (string.gsub(KEYS[2], '%c+', ' ')), list)}
end
if redis.call('HEXISTS', KEYS[3], redis.sha1hex(ARGV[2])) == 1 then return 0 end
local holder = redis.call('HGET', KEYS[4], ARGV[3])
if holder and redis.call('HEXISTS', KEYS[3], holder) == 1 then return 0 end
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
for i = 5, #KEYS do redis.call('DEL', KEYS[i]) end
redis.call('LPUSH', KEYS[2], ARGV[2])
return 1
