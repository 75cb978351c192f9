-- Leaves one message in nobody's hands until its time: its lease then runs out, and whoever reaps first puts it back.
-- KEYS: the lease keys. ARGV: owner, id, seconds, 1 where it is to keep its place. Returns 1, or 0 where the lease was no
-- longer the owner's.
local owner, id, seconds, keeps_place = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local list = owned_list(id, owner)
if not list then return 0 end
local record = record_of(id)
list = record and record.list or list
local problem = problem_of(delayed_from(list), 'zset') or record and problem_of_level(record.level)
if problem then return {err = problem} end
local due = now() + seconds
redis.call('ZADD', LEASES, due, id)
drop(held_from(list), id)
redis.call('ZADD', delayed_from(list), due, id)
redis.call('HSET', META, id, 'delayed|' .. list)
take_back_strike(id)
if record then
  refund(id, record)
  record.taken = nil
  if not keeps_place then -- it does not wait, and so does not age, before its time
    record.since, record.level = math.floor(due * 1000000), record.list
    record.due, record.first, record.held = record.since, nil, nil
  end
  delay(id, record)
end
return 1
