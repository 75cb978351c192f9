-- KEYS: the batch, a hash. ARGV: Unix seconds.
-- Returns the status that the batch had.
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'at:cancelling', ARGV[1])
end
return status
