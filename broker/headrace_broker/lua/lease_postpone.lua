-- Leaves one message in nobody's hands until its time: its lease then runs out, and whoever reaps first puts it back.
-- KEYS: the lease keys. ARGV: owner, id, seconds. Returns 1, or 0 where the lease was no longer the owner's.
local owner, id, seconds = ARGV[1], ARGV[2], tonumber(ARGV[3])
local list = owned_list(id, owner)
if not list then return 0 end
local due = now() + seconds
redis.call('ZADD', LEASES, due, id)
redis.call('ZREM', held_from(list), id)
redis.call('ZADD', delayed_from(list), due, id)
redis.call('HSET', META, id, 'delayed|' .. list)
take_back_strike(id)
local record = record_of(id)
if record then
  refund(id, record)
  -- it does not wait, and so does not age, before its time
  record.since, record.level = math.floor(due * 1000000), record.list
  delay(id, record)
end
return 1
