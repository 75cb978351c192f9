-- KEYS: the batch, a hash; the tokens of the claims, a hash. ARGV: Unix seconds, id.
-- Returns the status that the batch had. A batch that no replica has begun has no answers, and ends here.
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' and redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 then
  redis.call('HSET', KEYS[1], 'status', 'cancelled', 'at:cancelling', ARGV[1], 'at:cancelled', ARGV[1])
elseif status == 'validating' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'at:cancelling', ARGV[1])
end
return status
