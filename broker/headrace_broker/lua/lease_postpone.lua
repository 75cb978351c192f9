-- Delays one message. No worker holds it until it is due; its lease then expires, and the next reaper returns it to the
-- queue.
-- ARGV: owner, id, seconds, keeps_place
-- id: of the lease. seconds: the delay. keeps_place: 1 to keep its place in the queue and its age.
-- Returns 1, or 0 if the owner has lost the lease.
local list = owned_list(id, owner)
if not list then return 0 end
local record = record_of(id)
list = record and record.list or list
local problem = problem_of(delayed_key(list), 'zset') or record and problem_of_list(record.level)
if problem then return {err = problem} end
local due = now() + tonumber(seconds)
redis.call('ZADD', LEASES, due, id)
drop(held_key(list), id)
redis.call('ZADD', delayed_key(list), due, id)
redis.call('HSET', LEASE_META, id, 'delayed|' .. list)
uncount_delivery(id)
if record then
  refund(id, record)
  record.taken = nil
  record.unbegun = (record.unbegun or 0) + 1 -- a worker postpones only a request whose stream it has not begun
  if keeps_place ~= '1' then -- it begins to wait and to age when it is due
    record.since, record.level = math.floor(due * 1000000), record.list
    record.due, record.first, record.held = record.since, nil, nil
  end
  delay(id, record)
end
return 1
