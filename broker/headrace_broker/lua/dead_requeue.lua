-- Puts one dead letter back into its queue, as if it had just been sent: what its stream and result said is forgotten.
-- KEYS: dead letters, list, stream, result. ARGV: the letter as it lies there, the message.
-- Returns 1, or 0 where it is no longer among the dead letters.
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
redis.call('DEL', KEYS[3], KEYS[4])
redis.call('LPUSH', KEYS[2], ARGV[2])
return 1
