-- KEYS: BATCH, TOKENS
-- RIGHTS: BATCH
-- ARGV: now, id
-- now: Unix seconds.
-- Returns the status that the batch had before. A batch that no replica has begun becomes `cancelled` at once.
local status = redis.call('HGET', BATCH, 'status')
if status == 'validating' and redis.call('HEXISTS', TOKENS, id) == 0 then
  redis.call('HSET', BATCH, 'status', 'cancelled', 'at:cancelling', now, 'at:cancelled', now)
elseif status == 'validating' or status == 'in_progress' then
  redis.call('HSET', BATCH, 'status', 'cancelling', 'at:cancelling', now)
end
return status
