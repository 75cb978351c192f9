-- KEYS: BATCH, TOKENS
-- RIGHTS: BATCH
-- ARGV: id, token, statuses, fields[], values[]
-- token: the claim's token. statuses: comma-separated statuses in which the batch may be written.
-- Returns '' if the batch was written, 'lost' if another claim holds it or Redis has lost it, else its status.
local status = redis.call('HGET', BATCH, 'status')
if not status or redis.call('HGET', TOKENS, id) ~= token then
  return 'lost'
end
if not string.find(',' .. statuses .. ',', ',' .. status .. ',', 1, true) then
  return status
end
for i, field in ipairs(fields) do
  redis.call('HSET', BATCH, field, values[i])
end
return ''
